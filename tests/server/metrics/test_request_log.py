from __future__ import annotations

import pytest

from kvmosaic.sampling import ReuseReport
from kvmosaic.sampling.reuse import SegmentReuse
from kvmosaic.server.metrics.request_log import LEAST_TOKENS, REMEMBERED_TOKENS, RequestLog, RequestRecord


def record(number: int = 0, tenant: str = "acme") -> RequestRecord:
    return RequestRecord(f"request-{number}", "/v1/x", tenant, 0.0, 1, 1, ("stop",), "complete", None, None, (), None)


def report(computed: int, reused: int, milliseconds: float, ttft: float = 0.5) -> ReuseReport:
    segment = SegmentReuse("chunk", computed + reused, "computed", reused_tokens=reused, milliseconds=milliseconds)
    return ReuseReport((segment,), ttft)


def test_listeners_are_told_at_once() -> None:
    records, seen = RequestLog(), []
    records.listen(seen.append)
    records.add(record(7))
    assert [each.request_id for each in seen] == ["request-7"]


def test_time_without_reuse_is_estimated_from_what_computed_tokens_took() -> None:
    records = RequestLog()
    assert records.uncached_ttft(report(100, 900, 200)) is None
    assert records.uncached_ttft(report(100, 0, 200, ttft=0.5)) == 0.5, "nothing reused, nothing to estimate"
    records.learn(report(100, 900, 200))  # 2 ms per token
    assert records.uncached_ttft(report(100, 900, 200, ttft=0.5)) == pytest.approx(0.5 + 900 * 0.002)
    assert records.uncached_ttft(None) is None
    records.learn(report(0, 100, 5))  # nothing computed, nothing learned
    assert records.seconds_per_computed_token == pytest.approx(0.002)


def test_every_token_counts_the_same_and_old_ones_are_forgotten() -> None:
    records = RequestLog()
    records.learn(report(3_000, 0, 3_000))  # 1 ms per token
    records.learn(report(1_000, 0, 5_000))  # 5 ms per token
    assert records.seconds_per_computed_token == pytest.approx(0.002)
    for _ in range(10):
        records.learn(report(REMEMBERED_TOKENS, 0, 4 * REMEMBERED_TOKENS))
    assert records.seconds_per_computed_token == pytest.approx(0.004, rel=0.01)


def test_short_computations_and_questions_say_nothing_about_documents() -> None:
    records = RequestLog()
    for _ in range(100):
        records.learn(report(LEAST_TOKENS - 1, 900, 10_000))
    assert records.seconds_per_computed_token is None
    document = SegmentReuse("chunk", 1_000, "computed", milliseconds=1_000)
    question = SegmentReuse("question", 200, "computed", milliseconds=10_000)
    records.learn(ReuseReport((document, question), 0.5))
    assert records.seconds_per_computed_token == pytest.approx(0.001)
