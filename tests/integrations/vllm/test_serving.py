"""`vllm serve` with one worker and with two: the same answers, and the report in the reply."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.vllm.asking import compose, documents
from support.vllm.serving import ForkedServer

SYSTEM, *CHUNKS, QUESTION = documents(60, 40, 70, 65, 90, 19)


@pytest.fixture(scope="module", params=["copy", "in-place"])
def split(request, vllm_model):
    environment = {"KVMOSAIC_DOCUMENT_READS": request.param}
    server = ForkedServer(vllm_model("llama"), tensor_parallel_size=2, environment=environment)
    yield server
    server.stop()


def test_two_workers_say_what_one_says(split, vllm_engine):
    engine = vllm_engine("llama")
    for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
        ask = compose(SYSTEM, [CHUNKS[index] for index in order], QUESTION)
        assert ask.composition is not None
        reply = split.complete(
            list(ask.token_ids),
            logprobs=5,
            return_tokens_as_token_ids=True,
            kv_transfer_params=ask.composition.to_params(),
        )
        (choice,) = reply["choices"]
        report = reply["kv_transfer_params"]["kvmosaic"]
        assert not report["bypass"], report
        expected = engine.ask(ask)
        for step, top in zip(expected.logprobs[0], choice["logprobs"]["top_logprobs"], strict=True):
            said = {int(name.removeprefix("token_id:")): value for name, value in top.items()}
            both = said.keys() & step.keys()
            assert both and max(abs(said[token] - step[token]) for token in both) < 1e-4
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(ask.token_ids) - ask.question, "permuted documents compute the question alone, here too"


def test_sixteen_clients_at_once_get_their_own_answers(split, vllm_engine):
    engine = vllm_engine("llama")
    asks = [
        compose(SYSTEM, [CHUNKS[(number + step) % 3] for step in range(3)], [*QUESTION, number + 1])
        for number in range(16)
    ]

    def asked(ask):
        return split.complete(
            list(ask.token_ids),
            logprobs=5,
            return_tokens_as_token_ids=True,
            kv_transfer_params=ask.composition.to_params(),
        )

    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(asked, asks))
    for ask, reply in zip(asks, replies, strict=True):
        assert not reply["kv_transfer_params"]["kvmosaic"]["bypass"]
        top = reply["choices"][0]["logprobs"]["top_logprobs"][0]
        said = {int(name.removeprefix("token_id:")): value for name, value in top.items()}
        expected = engine.ask(ask).logprobs[0][0]
        both = said.keys() & expected.keys()
        assert both and max(abs(said[token] - expected[token]) for token in both) < 1e-4
