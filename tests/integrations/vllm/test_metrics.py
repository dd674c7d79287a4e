"""What vLLM's /metrics shows of composed requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from support.vllm import metering
from support.vllm.asking import compose, documents

from kvmosaic.vllm.contract import FIELD, Composition
from kvmosaic.vllm.report import ChunkOutcome, ComposedReport
from kvmosaic.vllm.report_counters import ReportCounters

SYSTEM, FIRST, SECOND, QUESTION = documents(7, 40, 70, 90, 11)


@pytest.fixture(scope="module")
def engine(vllm_engine):
    return vllm_engine("llama", disable_log_stats=False)


def test_every_request_is_counted_where_prometheus_looks(engine):
    before = engine.call(metering.shown)
    assert before["kvmosaic:chunk_tokens_total[moved]"] == 0
    [fresh] = engine.call("play", asks=[compose(SYSTEM, [FIRST, SECOND], QUESTION).to_json()], at=[0], abort=[None])
    assert fresh["kv_transfer_params"][FIELD]["totals"]["moved_tokens"] == 0
    [known] = engine.call("play", asks=[compose(SYSTEM, [SECOND, FIRST], QUESTION).to_json()], at=[0], abort=[None])
    assert known["kv_transfer_params"][FIELD]["totals"]["moved_tokens"] == 70
    bypassed = engine.ask(compose(SYSTEM, [FIRST, SECOND], QUESTION), prompt_logprobs=1)
    assert bypassed.kv_transfer_params[FIELD]["totals"]["cached_tokens"] == 0
    engine.call("settle")
    after = engine.call(metering.shown)
    assert after["kvmosaic:composed_requests_total"] == 2
    assert after["kvmosaic:bypassed_requests_total[prompt_logprobs]"] == 1
    assert after["kvmosaic:chunk_lookups_total"] == 4
    assert after["kvmosaic:chunk_misses_total"] == after["kvmosaic:chunk_hits_total"] == 2
    assert after["kvmosaic:chunk_prompts_total"] == 2
    assert after["kvmosaic:chunk_prompts_running"] == 0
    assert after["kvmosaic:pooled_documents"] == 2 and after["kvmosaic:pinned_documents"] == 0
    assert after["kvmosaic:pooled_blocks"] == 1 + 3 + 4, "the full block of the system text once"
    assert after["kvmosaic:document_evictions_total"] == 0
    assert after["kvmosaic:chunk_tokens_total[computed]"] == 70 + 90
    assert after["kvmosaic:chunk_tokens_total[reused]"] == 90
    assert after["kvmosaic:chunk_tokens_total[moved]"] == 70
    assert after["kvmosaic:moved_tokens_total"] >= 70 + 90, "the document behind the first one, each time"
    assert after["kvmosaic:move_seconds_total"] > 0
    assert fresh["kv_transfer_params"][FIELD]["totals"]["recomputed_tokens"] == 40 + 70 + 90 + 11


def test_engines_of_one_process_have_series_of_their_own_and_names_are_registered_once():
    from kvmosaic.vllm.connector import ComposingPromMetrics, ComposingStats

    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    engines = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    configuration = SimpleNamespace(kv_transfer_config=None)
    for _ in range(2):
        metrics = ComposingPromMetrics(configuration, kinds, ["model_name", "engine"], engines)
    tally = ReportCounters()
    layout = Composition(6, (4, 8)).layout(range(20))
    report = ComposedReport(layout, chunks=(ChunkOutcome("computed"), ChunkOutcome("cached")))
    tally.composed(report)
    stats = ComposingStats.taken_from(tally)
    assert not stats.is_empty()
    assert stats.aggregate(ComposingStats()).reduce() == stats.reduce()
    metrics.observe(stats.to_dict(), 1)

    def value(engine: str) -> float | None:
        return REGISTRY.get_sample_value("kvmosaic:chunk_lookups_total", {"model_name": "tiny", "engine": engine})

    assert (value("0"), value("1")) == (0, 2)
    assert ComposingStats().is_empty()
    assert ComposingStats.taken_from(tally) is None
