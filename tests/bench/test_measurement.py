"""Measuring, with fake engines whose times are known."""

from __future__ import annotations

import io
import json
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.fake_peer import FakePeer

from kvmosaic.lab.bench.campaign import add_shares
from kvmosaic.lab.bench.measurement import BenchRow, Spread, forget_peak, measure, num_answers, resident_bytes
from kvmosaic.lab.bench.models import Limits, TokenCost, measure_limits
from kvmosaic.lab.bench.peers import OFF, OWN
from kvmosaic.lab.bench.report import BenchReport, save_plots
from kvmosaic.lab.bench.results import can_plot
from kvmosaic.lab.bench.sizes import Sizes
from kvmosaic.lab.bench.workloads import build_workloads

GENERATE = "transformers generate"
SIZES = Sizes(4, 2, 8, 3, 4, 16, 4, 2, 5, 50, 10, 2)
WEIGHT = TokenCost(1_000, 800, 100, 16, 4)
LIMITS = Limits({1: 1e6}, {"float32": 1e6}, 1)


def peers(calls=None):
    return [
        FakePeer(OWN, is_ours=True, speed=10, calls=calls),
        FakePeer(OFF, calls=calls),
        FakePeer(GENERATE, speed=2, calls=calls),
    ]


@pytest.fixture
def report() -> BenchReport:
    rows = [row for work in build_workloads([], SIZES, 1_000) for row in measure(work, peers(), lambda what: None)]
    for row in rows:
        add_shares(row, LIMITS, WEIGHT)
    facts = {"processor": "a | b", "cores": 2, "threads": 1, "load_average": [0.0] * 3, "commit": "abc"}
    return BenchReport("fake", "quick", 0, facts, SIZES, LIMITS, {"float32": WEIGHT}, rows, ["A note."], 1.0)


def test_tables_fit_into_80_columns_and_cut_no_word(report: BenchReport) -> None:
    texts = []
    for row in report.rows:
        row.first_share, row.token_share = 0.123, 0.456  # no real engine is faster than the limit
    for width in (80, 160):
        console = Console(width=width, file=io.StringIO(), color_system=None)
        console.print(report.to_tables(width))
        texts.append(console.file.getvalue())
    narrow, wide = texts
    assert "…" not in narrow + wide
    table = narrow[narrow.index("\nworkload ") : narrow.index("\nfirst token, per token:")].strip()
    assert len(table.splitlines()) == 1 + len(report.rows), "a row is one line"
    assert "with --output all of it is shown" in " ".join(narrow.split())
    assert "peak memory" in wide.split(OWN)[0]


def test_engines_take_turns_and_another_one_begins_every_batch() -> None:
    calls: list[str] = []
    (workload,) = build_workloads(["repeated"], SIZES, 1_000)
    measure(workload, peers(calls), lambda what: None)
    answers = [call.removesuffix(" answers 1") for call in calls[-12:]]
    assert answers[:3] == [OWN, OFF, GENERATE]
    assert answers[3:6] == [OFF, GENERATE, OWN]
    assert [call for call in calls if call.endswith("resets")] == [f"{name} resets" for name in (OWN, OFF, GENERATE)]


def test_every_engine_forgets_and_gets_to_know_the_documents_before_it_is_measured() -> None:
    calls: list[str] = []
    (workload,) = build_workloads(["permuted"], SIZES, 1_000)
    rows = measure(workload, peers(calls), lambda what: None)
    assert calls[:2] == [f"{OWN} resets", f"{OWN} answers 1"]
    assert all(len(row.first_seconds) == SIZES.rounds for row in rows), "the prompt before is not counted"


def test_workloads_with_salts_are_for_our_engine_only() -> None:
    *_, workload = build_workloads(["sharers"], SIZES, 1_000)
    assert [row.peer for row in measure(workload, peers(), lambda what: None)] == [OWN]


def test_progress_comes_as_often_as_said() -> None:
    for workload in build_workloads([], SIZES, 1_000):
        seen: list[str] = []
        measure(workload, peers(), seen.append)
        assert len(seen) == num_answers(workload, peers())


def test_rows_keep_times_tokens_and_memory() -> None:
    *_, workload = build_workloads(["plain"], SIZES, 1_000)
    row = measure(workload, peers(), lambda what: None)[1]
    assert row.width == 8 and len(row.first_seconds) == 8 * SIZES.rounds
    assert row.first_seconds[0] == pytest.approx(0.016)
    assert row.num_answered == 8 * SIZES.rounds * SIZES.answer
    assert row.tokens_per_second == pytest.approx(row.num_answered / (8 * SIZES.rounds * 0.016))
    assert row.kv_bytes == 8_000
    assert row.peak_bytes is None or row.peak_bytes >= 0


def test_spread_is_median_and_quarters() -> None:
    spread = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert spread == Spread(3.0, 2.0, 4.0, 3.0, 5)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 2.0, 1)
    assert Spread.of([]) is None


def test_least_time_is_that_of_multiplying_or_of_reading() -> None:
    assert LIMITS.first_token_seconds(WEIGHT, "float32", 100, 0) == pytest.approx(2 * (800 * 100 + 100) / 1e6)
    assert LIMITS.first_token_seconds(WEIGHT, "float32", 1, 10_000) == pytest.approx((900 * 4 + 160_000) / 1e6)
    assert LIMITS.token_seconds(WEIGHT, 10) == pytest.approx((3_600 + 160) / 1e6)


def test_share_of_the_limit_counts_shared_documents_once_and_private_ones_each() -> None:
    shared, private = (
        BenchRow(name, "", OWN, "float32", True, width=8, first_seconds=[1.0] * 8, token_seconds=[1.0] * 8)
        for name in ("shared-8", "private-8")
    )
    for row in (shared, private):
        row.num_prompt = [1_000] * 8
        add_shares(row, LIMITS, WEIGHT)
    assert shared.token_share == pytest.approx((3_600 + 16_000) / 1e6)
    assert private.token_share == pytest.approx((3_600 + 128_000) / 1e6)


def test_share_of_prompts_asked_at_once_is_that_of_the_last_first_token() -> None:
    row = BenchRow("plain-2", "", OWN, "float32", True, width=2, first_seconds=[0.1, 0.8, 0.1, 0.8])
    row.num_prompt = row.num_computed = [100] * 4
    add_shares(row, LIMITS, WEIGHT)
    assert row.first_share == pytest.approx(2 * (800 * 200 + 100) / 1e6 / 0.8)


def test_of_two_limits_the_faster_one_counts() -> None:
    other = Limits({1: 2e6}, {"float32": 1e5}, 1)
    assert LIMITS.best_of(other) == Limits({1: 2e6}, {"float32": 1e6}, 1)


def test_limits_of_the_machine_are_measured() -> None:
    limits = measure_limits(1, ["float32"], num_bytes=2**20, tries=1)
    assert limits.bandwidth > 1e6 and limits.flops_per_second["float32"] > 1e6


def test_first_tokens_are_set_against_ours_in_the_same_dtype(report: BenchReport) -> None:
    slow = BenchRow("permuted", "", OWN, "bfloat16", True, first_seconds=[1e9])
    lines = [line.split(" | ") for line in replace(report, rows=[*report.rows, slow]).to_markdown().splitlines()]
    ratios = {cells[1]: cells[4] for cells in lines if cells[0] == "| permuted" and cells[2] == "float32"}
    assert ratios == {OWN: "–", OFF: "10x", GENERATE: "5x"}


def test_json_is_valid_and_says_where_it_was_measured(report: BenchReport) -> None:
    content = json.loads(report.to_json())
    assert content["machine"]["commit"] == "abc" and content["sizes"]["documents"] == 2
    assert {row["peer"] for row in content["rows"]} == {OWN, OFF, GENERATE}
    assert all(row["first_seconds"] for row in content["rows"])


def test_markdown_tables_have_as_many_cells_as_headings(report: BenchReport) -> None:
    tables = [block for block in report.to_markdown().split("\n\n") if block.startswith("|")]
    assert len(tables) == 1
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1
    assert "A note." in report.to_markdown()


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_one_plot_per_figure(report: BenchReport, tmp_path: Path) -> None:
    paths = save_plots(report, tmp_path, "fake")
    assert [path.name for path in paths] == [f"fake-{n}.png" for n in ("documents", "hit-rate", "sharers", "orders")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_peak_memory_falls_back_to_what_is_held() -> None:
    process_id = os.getpid()
    if resident_bytes(process_id) is None:
        pytest.skip("this system does not tell")
    with mmap.mmap(-1, 64 << 20) as block:
        for first in range(0, len(block), mmap.PAGESIZE):
            block[first] = 1  # so that it is in memory
        held = resident_bytes(process_id)
    forget_peak(process_id)
    peak = resident_bytes(process_id, peak=True)
    assert peak is not None and held is not None and peak < held
    assert resident_bytes(2**30) is None
