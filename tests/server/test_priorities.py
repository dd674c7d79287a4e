"""Priorities over HTTP: their range, the settings behind them, and what the metrics say."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.server import RunningServer

from kvmosaic.config import EngineConfig
from kvmosaic.errors import InvalidConfig
from kvmosaic.server.read import read_settings


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(request_cache_size="512KiB", preemption="swap", enable_prefix_caching=False) as running:
        yield running


def ask(server: RunningServer, **body: object) -> httpx.Response:
    body = {"prompt": "The ferry", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=60)


def metric(server: RunningServer, line: str) -> float:
    text = httpx.get(server.url + "/metrics").text
    return sum(float(each.split()[-1]) for each in text.splitlines() if each.startswith(line))


def test_the_wait_of_each_class_of_priority_is_counted(server: RunningServer) -> None:
    name = 'kvmosaic:request_queue_seconds_count{model_name="reader",priority='
    before = {kind: metric(server, f'{name}"{kind}"') for kind in ("low", "normal", "high")}
    for priority in (-100, -1, 0, 1, 100, None):
        assert ask(server, priority=priority).status_code == 200
    after = {kind: metric(server, f'{name}"{kind}"') for kind in ("low", "normal", "high")}
    assert {kind: after[kind] - before[kind] for kind in after} == {"low": 2, "normal": 2, "high": 2}


@pytest.mark.parametrize("priority", [101, -101, 0.5, "high", 2**40])
def test_a_priority_outside_its_range_is_refused(server: RunningServer, priority: object) -> None:
    reply = ask(server, priority=priority)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "priority"


def test_answers_that_gave_way_are_counted_by_what_became_of_their_blocks(server: RunningServer) -> None:
    pool = server.llm.engine.kv_cache.request_pool
    room = pool.num_blocks * pool.block_size
    reply = ask(server, n=6, max_tokens=room // 4, temperature=1, seed=1)
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 6
    counts = server.llm.engine.scheduler.preemption
    assert counts.counts["swap"] > 0 and counts.swap is not None
    assert metric(server, 'kvmosaic:preemptions_total{kind="swap"') == counts.counts["swap"]
    assert metric(server, 'kvmosaic:preemptions_total{kind="recompute"') == counts.counts["recompute"]
    assert metric(server, 'kvmosaic:swapped_bytes_total{direction="out"') == counts.swap.moved_bytes["out"] > 0
    assert metric(server, 'kvmosaic:swapped_bytes_total{direction="in"') == counts.swap.moved_bytes["in"] > 0
    assert metric(server, "kvmosaic:swap_space_bytes") == 0
    assert metric(server, "vllm:num_preemptions_total") == sum(counts.counts.values())


def test_the_settings_reach_the_engine() -> None:
    config = read_settings({"preemption": "recompute", "swap_space": "1MiB"}).llm_config().engine
    assert (config.preemption, config.swap_bytes) == ("recompute", 2**20)
    assert read_settings({"swap_space": "0"}).llm_config().engine.swap_bytes == 0
    defaults, known = read_settings({}).llm_config().engine, EngineConfig()
    for name in ("preemption", "swap_bytes"):
        assert getattr(defaults, name) == getattr(known, name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"swap_space": "much"}, "--swap-space"),
        ({"preemption": "drop"}, "--preemption"),
        ({"preemption": "swap", "swap_space": "0"}, "--preemption swap needs memory"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        read_settings(given)
