from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from support.server import RunningServer

from kvmosaic.errors import KVMosaicError, PromptTooLong
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams
from kvmosaic.server.errors import ApiError
from kvmosaic.server.record import RequestRecord
from kvmosaic.server.running import run
from kvmosaic.server.services import NUM_THREADS
from kvmosaic.server.tenants import Tenant

ACME, UMBRA = Tenant("acme"), Tenant("umbra")
TEXT = "Answer. ## The ferry of Bellos goes to Oak Island at seven. ## Where does the ferry go?"


def ask(server: RunningServer, tenant: Tenant, prompt: Prompt, **sampling: Any) -> RequestRecord:
    """Runs a prompt to its end and returns its record."""
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling})

    async def read() -> RequestRecord:
        services = server.services
        deltas = run(services, tenant, prompt, params, route="/test", request_id="case-7")
        num_tokens = sum([len(answer.token_ids) async for delta in deltas for answer in delta.answers])
        record = services.records.recent()[-1]
        assert record.num_answer_tokens == num_tokens
        return record

    record: RequestRecord = server.call(read)
    return record


def prompt_of(server: RunningServer, text: str = TEXT) -> Prompt:
    return server.services.llm.encoder.encode(Prompt.from_text(text))


def test_record_tells_what_became_of_a_request(server: RunningServer) -> None:
    prompt = prompt_of(server)
    record = ask(server, ACME, prompt, n=2)
    assert (record.request_id, record.route, record.tenant, record.status) == ("case-7", "/test", "acme", "complete")
    assert record.num_prompt_tokens == prompt.num_tokens and record.num_answer_tokens == 8
    assert record.finish_reasons == ("length", "length")
    assert record.reuse is not None and record.reuse.num_tokens == prompt.num_tokens
    assert record.metrics is not None and record.metrics.total_time is not None
    assert 0 < len(record.inter_token_seconds) <= 6 and all(gap >= 0 for gap in record.inter_token_seconds)
    assert abs(record.time - time.time()) < 60


def test_tenants_share_nothing(server: RunningServer) -> None:
    prompt = prompt_of(server, TEXT.replace("seven", "eight"))
    actions = []
    for tenant in (ACME, UMBRA, ACME, UMBRA):
        reuse = ask(server, tenant, prompt).reuse
        assert reuse is not None
        actions.append(next(segment.action for segment in reuse.segments if segment.kind == "chunk"))
    assert actions == ["computed", "computed", "reused", "reused"]


def test_reused_tokens_make_the_estimate_larger_than_what_was_measured(server: RunningServer) -> None:
    prompt = prompt_of(server, TEXT.replace("seven", "nine"))
    ask(server, ACME, prompt)
    record = ask(server, ACME, prompt)
    assert record.reuse is not None and record.reuse.time_to_first_token is not None
    assert record.estimated_uncached_ttft is not None
    assert record.estimated_uncached_ttft > record.reuse.time_to_first_token


def test_request_that_the_engine_refuses_is_recorded_as_failed(server: RunningServer) -> None:
    prompt = Prompt.plain([5] * 100_000)
    with pytest.raises(PromptTooLong):
        ask(server, ACME, prompt)
    record = server.services.records.recent()[-1]
    assert (record.status, record.num_prompt_tokens, record.num_answer_tokens) == ("failed", 100_000, 0)
    assert server.services.admission.num_under_way == 0


def test_refusal_at_the_door_is_no_record(server: RunningServer) -> None:
    before = server.services.records.recent()
    server.services.admission.is_draining = True
    try:
        with pytest.raises(ApiError):
            ask(server, ACME, prompt_of(server))
    finally:
        server.services.admission.is_draining = False
    assert server.services.records.recent() == before


def test_stopped_engine_is_503() -> None:
    with RunningServer() as server:
        prompt = prompt_of(server)
        server.call(server.services.engine.close)
        with pytest.raises((ApiError, KVMosaicError)) as caught:
            ask(server, ACME, prompt)
        assert isinstance(caught.value, ApiError) and caught.value.status == 503


def test_work_beside_the_loop_is_bounded() -> None:
    with RunningServer(max_queue=3) as server:
        most, release = 3 + NUM_THREADS, threading.Event()

        async def fill() -> list[Any]:
            tasks = [asyncio.create_task(server.services.in_thread(release.wait, 30)) for _ in range(most + 2)]
            await asyncio.sleep(0.05)
            release.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = server.call(fill)
        assert results[:most] == [True] * most
        assert [getattr(refusal, "status", None) for refusal in results[most:]] == [429, 429]
        assert server.call(server.services.in_thread, divmod, 7, 2) == (3, 1)


def test_error_of_work_beside_the_loop_is_raised(server: RunningServer) -> None:
    with pytest.raises(ZeroDivisionError):
        server.call(server.services.in_thread, divmod, 1, 0)
