from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.promql import matchers_in, names_in
from support.server import RunningServer

from kvmosaic.metrics import own_names

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "kvmosaic.json").read_text())
PAGE = (ROOT / "docs" / "server" / "metrics.md").read_text()
FROM_PROMETHEUS = {"up": {"job", "instance"}}
"""What Prometheus itself adds: a series per target, and labels of every series."""
TARGET_LABELS = {"job", "instance"}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def board_expressions() -> dict[str, list[str]]:
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in BOARD["panels"]
        if panel["type"] != "row"
    }


def page_expressions() -> list[str]:
    after = PAGE.split("## Which numbers to look at")[1].split("## Alerts")[0]
    return re.findall(r"(?:^    .*\n)+", after, re.MULTILINE)


EXPRESSIONS = {
    **{f"alert {rule['alert']}": rule["expr"] for rule in alerts()},
    **{f"panel {title} {n}": each for title, exprs in board_expressions().items() for n, each in enumerate(exprs)},
    **{f"page {n}": each for n, each in enumerate(page_expressions())},
    **{
        f"variable {variable['name']}": variable["definition"].split("(", 1)[1].rsplit(",", 1)[0]
        for variable in BOARD["templating"]["list"]
        if "definition" in variable
    },
}


@pytest.fixture(scope="module")
def series() -> dict[str, dict[str, set[str]]]:
    """Per name on /metrics of a real server that has answered, the values of each label."""
    with RunningServer(chunk_tier=["host:64MiB"]) as server:
        body = {"model": server.model, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
        body["documents"] = [{"id": "a", "text": "Corlow Lighthouse was built in 1820."}]
        for _ in range(2):
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        body["documents"] = [{"id": "b", "text": "Corlow Lighthouse was built in 1820. " * 50}]
        for _ in range(3):  # computed, then loaded from the tier
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
            cold = {"min_accesses": 2**20, "idle_seconds": 0}
            assert httpx.post(f"{server.url}/v1/documents:sleep", json=cold).status_code == 200
        text = httpx.get(f"{server.url}/metrics").text
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def test_every_name_and_label_of_an_expression_is_exported(series: dict[str, dict[str, set[str]]]) -> None:
    known = {name: TARGET_LABELS | set(labels) for name, labels in series.items()} | FROM_PROMETHEUS
    faults = []
    for where, expression in EXPRESSIONS.items():
        names = names_in(expression)
        faults += [f"{where}: no metric {name}" for name in sorted(names - set(known))] if names else [f"{where}: none"]
        faults += [
            f"{where}: {metric} has no label {label}"
            for metric, label, _ in matchers_in(expression)
            if label not in known.get(metric, [label])
        ]
    assert len(EXPRESSIONS) > 50 and faults == []


def test_values_that_expressions_ask_for_exist(series: dict[str, dict[str, set[str]]]) -> None:
    for label in ("pool", "state", "action", "outcome"):
        asked = {
            (metric, part)
            for expression in EXPRESSIONS.values()
            for metric, name, value in matchers_in(expression)
            if name == label
            for part in value.split("|")
        }
        assert asked
        assert [each for each in sorted(asked) if each[1] not in series[each[0]][label]] == []


def test_states_of_a_pool_add_up_in_the_catalogue(series: dict[str, dict[str, set[str]]]) -> None:
    assert series["kvmosaic:pool_blocks"]["state"] == set(own_names.STATES)
    assert series["kvmosaic:pool_blocks"]["pool"] == set(own_names.POOLS)


def test_names_are_found_in_an_expression_and_nothing_else() -> None:
    expression = """
        sum by (instance, le) (rate(a:b_total{x="a c", y=~"z|w"}[5m])) / on (job) group_left () c > 0.005
        and histogram_quantile(0.95, d_bucket[$__rate_interval]) != bool 1e-3 or up{job="k"} == 0
    """
    assert names_in(expression) == {"a:b_total", "c", "d_bucket", "up"}
    assert matchers_in(expression) == [("a:b_total", "x", "a c"), ("a:b_total", "y", "z|w"), ("up", "job", "k")]
