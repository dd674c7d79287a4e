"""Documents that have no room in the chunk cache: when a request arrives, and when pins and quotas take it later."""

from __future__ import annotations

import pytest
import torch
from support.cpu_time import least_cpu_seconds
from support.engines import GREEDY, build_engine, token_ids
from support.families import build

from kvmosaic.engine import Engine, Request
from kvmosaic.errors import ChunkCacheFull
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

OTHER, DOCUMENTS = [9] * 40, [[10 + n % 90 for n in range(40)], [20 + n % 90 for n in range(24)]]
PROMPT = Prompt.from_tokens([5, 6, 7], DOCUMENTS, [3, 4, 5])


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


def queued(model: LoadedModel, params: SamplingParams = GREEDY, **options: str) -> tuple[Engine, Request]:
    """A request whose documents have room, behind one that runs."""
    engine = build_engine(model, blocks=(128, 20), max_running=1, **options)
    engine.add_request(Prompt.from_tokens([5, 6, 7], [OTHER], [3, 4, 5], names=["other"]), GREEDY)
    engine.step()
    request = engine.add_request(PROMPT, params)
    assert not request.note
    return engine, request


def take_room(engine: Engine, how: str) -> None:
    if how == "pin":
        engine.kv_cache.pin("other", None)
    else:
        engine.kv_cache.set_quota("", 12)


@pytest.mark.parametrize("how", ["pin", "quota"])
@pytest.mark.parametrize("n", [1, 2])
def test_documents_that_lose_their_room_while_they_wait_are_answered_as_an_ordinary_prompt(model, how, n) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=n, presence_penalty=0.1)
    engine, request = queued(model, params)
    take_room(engine, how)
    engine.run([request])
    engine.check_invariants()
    plain = build_engine(model)
    right = plain.add_request(PROMPT.joined(), params)
    plain.run([right])
    assert [list(output.token_ids) for output in request.output().outputs] == [token_ids(right)] * n
    assert "need 16 blocks of 4 tokens, more than the chunk cache has for them" in request.reuse.composition
    assert request.output().prompt_token_ids == right.token_ids
    assert not engine.has_unfinished_requests and not engine.scheduler.num_waiting


@pytest.mark.parametrize("how", ["pin", "quota"])
def test_they_fail_where_the_settings_want_an_error(model, how) -> None:
    engine, request = queued(model, oversized_prompts="error")
    take_room(engine, how)
    with pytest.raises(ChunkCacheFull):
        engine.run([request])
    engine.check_invariants()
    assert not engine.has_unfinished_requests


def test_a_score_and_a_warm_up_without_room_fail(model) -> None:
    engine, request = queued(model)
    others = [engine.add_score(PROMPT, [1, 2]), engine.add_warm_up(PROMPT)]
    take_room(engine, "pin")
    engine.run([request])
    while engine.has_unfinished_requests:
        engine.step()
    assert [type(other.error) for other in others] == [ChunkCacheFull] * 2


def test_documents_fit_together_where_they_begin_alike(model) -> None:
    documents = [[*range(10, 50), *range(60 + 5 * number, 64 + 5 * number)] for number in range(6)]
    prompt = Prompt.from_tokens([5, 6, 7], documents, [3, 4, 5])
    engine, large = build_engine(model, blocks=(128, 16)), build_engine(model, block_size=64)
    requests = [each.add_request(prompt, GREEDY) for each in (engine, large)]
    for each, request in zip((engine, large), requests, strict=True):
        each.run([request])
    assert not requests[0].note and token_ids(requests[0]) == token_ids(requests[1])
    assert engine.kv_cache.chunk_pool.num_used == 10 + 6
    assert engine.kv_cache.statistics().computed_tokens == 40 + 6 * 4


def test_documents_that_begin_alike_are_counted_in_linear_time(model) -> None:
    engine = build_engine(model, blocks=(128, 64))

    def seconds(count: int) -> float:
        documents = [[7] * 64 + [number // 90 + 10, number % 90 + 10] for number in range(count)]
        layout = engine.arrange(Prompt.from_tokens([5, 6, 7], documents, [3, 4, 5]))
        assert engine.kv_cache.num_too_large(layout) == 16 + count
        return least_cpu_seconds(lambda: engine.kv_cache.num_too_large(layout))

    seconds(100)
    assert seconds(4_000) < 8 * seconds(1_000)
