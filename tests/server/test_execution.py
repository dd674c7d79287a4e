from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.server import RunningServer, wait_until

from kvmosaic.errors import KVMosaicError, PromptTooLong
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams
from kvmosaic.server.admission import NUM_THREADS
from kvmosaic.server.metrics.request_log import RequestRecord
from kvmosaic.server.tenants import Tenant
from kvmosaic.web.errors import ApiError

ACME, UMBRA = Tenant("acme"), Tenant("umbra")
TEXT = "Answer. ## The ferry of Bellos goes to Oak Island at seven. ## Where does the ferry go?"


def ask(server: RunningServer, tenant: Tenant, prompt: Prompt, **sampling: Any) -> RequestRecord:
    """Runs a prompt to its end and returns its record."""
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling})

    async def read() -> RequestRecord:
        services = server.services
        deltas = services.runner.run(tenant, prompt, params, route="/test", request_id="case-7")
        num_tokens = sum([len(answer.token_ids) async for delta in deltas for answer in delta.answers])
        record = server.records[-1]
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
    prompt = prompt_of(server, TEXT.replace("seven", " ".join(["nine"] * 100)))
    ask(server, ACME, prompt)
    record = ask(server, ACME, prompt)
    assert record.reuse is not None and record.reuse.time_to_first_token is not None
    assert record.estimated_uncached_ttft is not None
    assert record.estimated_uncached_ttft > record.reuse.time_to_first_token


def test_request_that_the_engine_refuses_is_recorded_as_failed(server: RunningServer) -> None:
    prompt = Prompt.plain([5] * 100_000)
    with pytest.raises(PromptTooLong):
        ask(server, ACME, prompt)
    record = server.records[-1]
    assert (record.status, record.num_prompt_tokens, record.num_answer_tokens) == ("failed", 100_000, 0)
    assert server.services.admission.num_under_way == 0


def test_refusal_at_the_door_is_no_record(server: RunningServer) -> None:
    before = list(server.records)
    server.services.admission.is_draining = True
    try:
        with pytest.raises(ApiError):
            ask(server, ACME, prompt_of(server))
    finally:
        server.services.admission.is_draining = False
    assert server.records == before


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
            tasks = [
                asyncio.create_task(server.services.threads.run(f"t{number}", release.wait, 30))
                for number in range(most + 2)
            ]
            await asyncio.sleep(0.05)
            release.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = server.call(fill)
        assert results[:most] == [True] * most
        assert [getattr(refusal, "status", None) for refusal in results[most:]] == [429, 429]
        assert server.call(server.services.threads.run, "one", divmod, 7, 2) == (3, 1)


def test_error_of_work_beside_the_loop_is_raised(server: RunningServer) -> None:
    with pytest.raises(ZeroDivisionError):
        server.call(server.services.threads.run, "one", divmod, 1, 0)


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once upon a time"}], "n": 3, "max_tokens": 9},
    "/v1/completions": {"prompt": "Once upon a time", "n": 3, "max_tokens": 9},
    "/v1/responses": {"input": "Once upon a time", "max_output_tokens": 9},
}


def test_answers_that_are_aborted_before_their_first_token_are_said_to_be_unavailable() -> None:
    """Of three answers only the first one has begun to exist then."""
    with RunningServer(max_num_seqs=3) as server, ThreadPoolExecutor(8) as threads:
        params = SamplingParams(n=3, max_tokens=1_500, ignore_eos=True, temperature=0.0)
        [tenant] = server.services.tenants  # the same as that of the others: another one's would give way to them
        long = server.services.runner.run(tenant, prompt_of(server), params, route="/test", request_id="long")
        server.call(anext, long)
        asked = [
            threads.submit(
                httpx.post, server.url + path, json={"model": "reader", "stream": stream, **body}, timeout=60
            )
            for path, body in BODIES.items()
            for stream in (False, True)
        ]
        wait_until(lambda: server.services.engine.num_waiting == len(asked))
        server.call(server.services.engine.close)
        for reply in (each.result(60) for each in asked):
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1, reply.text
            assert reply.json()["error"]["code"] in ("unavailable", "engine_stopped"), reply.text
        server.call(long.aclose)
        assert server.services.admission.num_under_way == 0


def test_more_answers_than_can_run_at_once_are_a_mistake() -> None:
    with RunningServer(max_num_seqs=2) as server:
        for path, body in list(BODIES.items())[:2]:
            reply = httpx.post(server.url + path, json=body, timeout=60)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n"), reply.text
            assert "--max-num-seqs" in reply.text


def test_every_answer_takes_a_place(server: RunningServer) -> None:
    params = SamplingParams(n=3, max_tokens=500, ignore_eos=True, temperature=0.0)
    answers = server.services.runner.run(ACME, prompt_of(server), params, route="/test", request_id="three")
    server.call(anext, answers)
    assert server.services.admission.num_under_way == 3
    server.call(answers.aclose)
    assert server.services.admission.num_under_way == 0


def test_only_an_admin_goes_before_others(server: RunningServer) -> None:
    others = Tenant("others", None, False)
    params = SamplingParams(max_tokens=1)
    eager = server.services.runner.run(others, prompt_of(server), params, route="/test", request_id="eager", priority=1)
    with pytest.raises(ApiError, match="admin") as refusal:
        server.call(anext, eager)
    assert refusal.value.status == 403
    patient = server.services.runner.run(
        others, prompt_of(server), params, route="/test", request_id="patient", priority=-1
    )
    server.call(anext, patient)
    server.call(patient.aclose)
