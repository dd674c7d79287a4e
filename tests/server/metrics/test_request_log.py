from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from kvmosaic.sampling import ReuseReport
from kvmosaic.sampling.reuse import SegmentReuse
from kvmosaic.server.metrics.request_log import LEAST_TOKENS, MAX_UNREAD, REMEMBERED_TOKENS, RequestLog, RequestRecord


def record(number: int = 0, tenant: str = "acme") -> RequestRecord:
    return RequestRecord(f"request-{number}", "/v1/x", tenant, 0.0, 1, 1, ("stop",), "complete", None, None, (), None)


def report(computed: int, reused: int, milliseconds: float, ttft: float = 0.5) -> ReuseReport:
    segment = SegmentReuse("chunk", computed + reused, "computed", reused_tokens=reused, milliseconds=milliseconds)
    return ReuseReport((segment,), ttft)


def test_oldest_records_leave() -> None:
    records = RequestLog(3)
    for number in range(5):
        records.add(record(number, "acme" if number % 2 else "umbra"))
    assert [each.request_id for each in records.recent()] == ["request-2", "request-3", "request-4"]
    assert [each.request_id for each in records.recent(1)] == ["request-4"]
    assert [each.request_id for each in records.recent(5, "acme")] == ["request-3"]
    assert records.recent(0) == []


def test_subscribers_see_every_new_record_of_their_tenant_until_the_end() -> None:
    async def check() -> tuple[list[str], list[str]]:
        records = RequestLog()

        async def read(tenant: str | None) -> list[str]:
            return [each.request_id async for each in records.subscribe(tenant)]

        tasks = [asyncio.create_task(read(None)), asyncio.create_task(read("acme"))]
        await asyncio.sleep(0)
        for number in range(3):
            records.add(record(number, "umbra" if number == 1 else "acme"))
        await asyncio.sleep(0)
        records.close()
        assert [each async for each in records.subscribe()] == []
        return await tasks[0], await tasks[1]

    everything, mine = asyncio.run(check())
    assert everything == ["request-0", "request-1", "request-2"] and mine == ["request-0", "request-2"]


def test_slow_reader_loses_the_oldest_and_one_that_leaves_is_forgotten() -> None:
    async def check() -> None:
        records = RequestLog()
        async with aclosing(records.subscribe()) as news:
            first = asyncio.create_task(anext(news))
            await asyncio.sleep(0)
            records.add(record(0))
            assert (await first).request_id == "request-0"
            for number in range(1, MAX_UNREAD + 11):
                records.add(record(number))
            assert (await anext(news)).request_id == "request-11"
        assert not records._queues

    asyncio.run(check())


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
