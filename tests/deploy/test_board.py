from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "kvmosaic.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
VARIABLES = {variable["name"] for variable in BOARD["templating"]["list"]}


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (beside or above)


def test_panels_lie_beside_each_other_within_the_width_of_the_board() -> None:
    for panel in PANELS:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in combinations(PANELS, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), f"{one['title']} and {other['title']}"


def test_every_panel_has_a_number_a_title_and_a_query_of_its_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in GRAPHS:
        names = [target["refId"] for target in panel["targets"]]
        assert names and len(set(names)) == len(names)


def test_every_query_asks_the_chosen_source_for_the_chosen_servers() -> None:
    for panel in GRAPHS:
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", panel["title"]
            assert "$instance" in target["expr"], panel["title"]
            assert target["expr"].count("(") == target["expr"].count(")"), panel["title"]
            assert target["expr"].count("{") == target["expr"].count("}"), panel["title"]


def test_variables_that_queries_use_are_defined() -> None:
    assert {"datasource", "model", "instance"} == VARIABLES
    assert BOARD["uid"] == "kvmosaic"


def test_the_board_shows_what_the_cache_does() -> None:
    for metric in (
        "vllm:time_to_first_token_seconds_bucket",
        "kvmosaic:request_uncached_ttft_seconds_bucket",
        "kvmosaic:chunk_hits_total",
        "kvmosaic:chunk_tokens_total",
        "kvmosaic:pool_bytes",
        "kvmosaic:chunk_evictions_total",
        "kvmosaic:chunk_lookup_seconds_sum",
        "kvmosaic:chunk_allocate_seconds_sum",
        "kvmosaic:chunk_compute_seconds_sum",
        "kvmosaic:repaired_tokens_total",
        "vllm:num_requests_waiting",
        "vllm:generation_tokens_total",
        "kvmosaic:admission_rejections_total",
    ):
        assert any(metric in target["expr"] for panel in GRAPHS for target in panel["targets"]), metric
