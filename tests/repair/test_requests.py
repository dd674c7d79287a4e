"""Requests that are repaired: what they refuse, how they end, and what else may be asked of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from support.async_engines import RunnerThatFails, assert_only_the_cache_holds_blocks, read, running
from support.engines import GREEDY, answer, build_engine, dense_logits, token_ids
from support.families import build
from support.loaded import chatting_llama, loaded_family
from support.watching import Spy

from kvmosaic import LLM
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.errors import EngineError, InvalidRepair, PromptTooLong
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, Segment, SegmentKind

SYSTEM, QUESTION = [3, 4, 5], [90, 91, 92]
DOCUMENTS = [list(range(20, 33)), list(range(40, 49)), list(range(60, 75))]
PROMPT = Prompt.from_tokens(SYSTEM, DOCUMENTS, QUESTION)
REPAIRS = ("first(2)", "deviation(0.3)", "query(0.3)", "combined(0.3)", "full")
MEASURED = ("deviation(0.3)", "query(0.3)")


def llama():
    return loaded_family("llama")


def ask(repair, **options):
    return replace(GREEDY, repair=repair, **options)


def alone(repair, prompt=PROMPT, **options):
    """What a fresh engine answers."""
    request, _ = answer(build_engine(llama()), prompt, ask(repair, **options))
    return token_ids(request)


def joined(prompt=PROMPT):
    return Prompt.plain([token for segment in prompt.segments for token in segment.token_ids])


# What is refused


@pytest.mark.parametrize("repair", sorted(set(REPAIRS) - {"full"}))
def test_a_window_and_repaired_documents_do_not_go_together(repair):
    engine = build_engine(llama())
    with pytest.raises(InvalidRepair, match=r"window_tokens.*use repair='none' or 'full'"):
        engine.add_request(PROMPT, ask(repair, window_tokens=16))
    assert not engine.has_unfinished_requests


def test_causal_reading_and_a_window_go_together():
    options = {"window_tokens": 16, "sink_tokens": 4, "max_tokens": 40}
    request, _ = answer(build_engine(llama()), PROMPT, ask("full", **options))
    expected, _ = answer(build_engine(llama()), joined(), ask(None, **options))
    assert token_ids(request) == token_ids(expected)


def test_an_engine_that_repairs_still_takes_endless_plain_prompts():
    options = {"engine_options": {"max_model_len": 32}, "blocks": (64, 64)}
    engine = build_engine(llama(), repair="full", **options)
    endless = Prompt.plain([number % 100 + 3 for number in range(60)])
    window = ask(None, window_tokens=8, sink_tokens=4)
    request, _ = answer(engine, endless, window)
    assert request.reuse.repair is None
    assert token_ids(request) == token_ids(answer(build_engine(llama(), **options), endless, window)[0])


@pytest.mark.parametrize("repair", ["first(2)", *MEASURED])
def test_biases_by_distance_are_not_repaired_in_part(repair):
    model = loaded_family("bloom")
    with pytest.raises(InvalidRepair, match=r"adds a bias by distance.*use repair='none' or 'full'"):
        build_engine(model).add_request(PROMPT, ask(repair))
    with pytest.raises(InvalidRepair, match="adds a bias by distance"):
        build_engine(model, repair=repair)


def test_biases_by_distance_and_the_rest_go_together():
    model = loaded_family("bloom")
    request, logits = answer(build_engine(model), PROMPT, ask("full"))
    torch.testing.assert_close(logits, dense_logits(model, request.layout, token_ids(request)), atol=1e-10, rtol=0)


def test_one_layer_has_no_second_one():
    model = LoadedModel.from_module(build("llama", torch.float64, num_hidden_layers=1))
    engine = build_engine(model)
    for repair in ("deviation(0.3)", "combined(0.3)"):
        with pytest.raises(InvalidRepair, match=r"second layer, and this model has 1; use 'first\(k\)' or 'query"):
            engine.add_request(PROMPT, ask(repair))
    request, logits = answer(engine, PROMPT, ask("query(0.3)"))
    torch.testing.assert_close(logits, dense_logits(model, request.layout, token_ids(request)), atol=1e-10, rtol=0)


NONSENSE = [None, 5, [[0]], [[0], [99], []], [[], [0.5], []], [0, 1, 2], ValueError("no idea")]


@pytest.mark.parametrize("choice", NONSENSE, ids=repr)
def test_a_choice_that_makes_no_sense_ends_its_request_and_no_other(choice):
    engine = build_engine(llama())
    wrong = Spy(choice=choice if choice is not None else 0)
    other = engine.add_request(PROMPT, ask("query(0.3)"))
    request = engine.add_request(PROMPT, ask(wrong))
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    assert isinstance(request.error, InvalidRepair) and "spy" in str(request.error)
    assert other.error is None and token_ids(other) == alone("query(0.3)")
    assert_only_the_cache_holds_blocks(engine)


@pytest.mark.parametrize("choice", [5, [[0]], ValueError("no idea")], ids=repr)
def test_a_choice_made_at_once_is_refused_at_once(choice):
    engine = build_engine(llama())
    with pytest.raises(InvalidRepair, match="spy"):
        engine.add_request(PROMPT, ask(Spy(frozenset(), choice)))
    assert not engine.has_unfinished_requests


def test_a_policy_of_ones_own_repairs_what_it_chose_but_nothing_exact():
    request, logits = answer(build_engine(llama()), PROMPT, ask(Spy(choice=[[0, 1], [8, 0, 0], []])))
    index = request.layout.repair
    assert index is not None and request.layout.spans[index].token_ids == (40, 48)
    torch.testing.assert_close(logits, dense_logits(llama(), request.layout, token_ids(request)), atol=1e-10, rtol=0)


# What is not repaired


@pytest.mark.parametrize("repair", REPAIRS)
def test_plain_prompts_are_what_they_were(repair):
    request, logits = answer(build_engine(llama()), joined(), ask(repair))
    expected, expected_logits = answer(build_engine(llama()), joined(), ask(None))
    assert torch.equal(logits, expected_logits) and request.reuse.repair is None
    assert request.reuse.composition == expected.reuse.composition == "exact"


@pytest.mark.parametrize("repair", [*REPAIRS, Spy()], ids=str)
def test_one_document_is_exact_and_nothing_is_measured_or_repaired(repair):
    prompt = Prompt.from_tokens(SYSTEM, DOCUMENTS[:1], QUESTION)
    engine = build_engine(llama())
    answer(engine, prompt)
    request, _ = answer(engine, prompt, ask(repair))
    use = request.reuse.repair
    assert use is not None and use.document_tokens == 13
    if repair == "full":
        assert use.repaired_tokens == 13
        return
    assert (use.repaired_tokens, use.computed_tokens, use.work_fraction, use.fraction) == (0, 0, 0, 0)
    if isinstance(repair, Spy):
        assert repair.seen[-1][0].deviation == () and repair.seen[-1][0].attention == ()
    if not str(repair).startswith("temperature"):
        assert token_ids(request) == alone("none", prompt)


@pytest.mark.parametrize("repair", REPAIRS)
def test_warm_ups_are_not_repaired(repair):
    engine = build_engine(llama(), repair=repair)
    request = engine.add_warm_up(PROMPT)
    engine.run([request])
    assert request.reuse.repair is None and request.reuse.computed_tokens == 3 + 13 + 9 + 15
    assert answer(engine, PROMPT)[0].answers[0].token_ids == alone(repair)


# What else prompts and settings may be


@pytest.mark.parametrize("repair", REPAIRS[:4])
@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_documents_that_see_others_are_repaired_like_all(strategy, repair):
    chunks = (
        Segment(SegmentKind.CHUNK, tuple(DOCUMENTS[0])),
        Segment(SegmentKind.CHUNK, tuple(DOCUMENTS[1]), sees=(0,)),
        Segment(SegmentKind.CHUNK, tuple(DOCUMENTS[2]), sees=(1,)),
    )
    prompt = Prompt((PROMPT.segments[0], *chunks, PROMPT.segments[-1]))
    request, logits = answer(build_engine(llama(), position_strategy=strategy), prompt, ask(repair))
    index = request.layout.repair
    assert index is not None and set(request.layout.spans[index].token_ids) <= set(DOCUMENTS[2]), "the others are exact"
    torch.testing.assert_close(logits, dense_logits(llama(), request.layout, token_ids(request)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("repair", REPAIRS[:4])
def test_documents_in_places_of_their_own_are_repaired_there(family, repair):
    model, offsets = loaded_family(family), (40, 5, 60)
    chunks = [
        Segment(SegmentKind.CHUNK, tuple(document), position_offset=offset)
        for document, offset in zip(DOCUMENTS, offsets, strict=True)
    ]
    prompt = Prompt((PROMPT.segments[0], *chunks, PROMPT.segments[-1]))
    request, logits = answer(build_engine(model, position_strategy="absolute"), prompt, ask(repair))
    assert request.layout.repair is not None
    torch.testing.assert_close(logits, dense_logits(model, request.layout, token_ids(request)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("repair", REPAIRS)
def test_several_answers_to_a_repaired_prompt_are_the_same_when_greedy(repair):
    request, _ = answer(build_engine(llama(), max_batched_tokens=9), PROMPT, ask(repair, n=3))
    assert [list(each.token_ids) for each in request.answers] == [alone(repair)] * 3


@pytest.mark.parametrize("repair", REPAIRS)
def test_the_last_position_may_be_used_and_not_one_more(repair):
    strategy = {"position_strategy": "shared"}
    end = sum(map(len, (SYSTEM, *DOCUMENTS, QUESTION))) if repair == "full" else 3 + 15 + 3
    for room in (1, 4):
        engine = build_engine(llama(), engine_options={"max_model_len": end + room}, **strategy)
        request, _ = answer(engine, PROMPT, ask(repair, max_tokens=100))
        assert len(token_ids(request)) == room
        assert request.output().outputs[0].finish_reason == "length"
    with pytest.raises(PromptTooLong):
        build_engine(llama(), engine_options={"max_model_len": end}, **strategy).add_request(PROMPT, ask(repair))


# How they end


def measuring(engine, repair, prompt=PROMPT):
    """A request in the middle of its measuring."""
    request = engine.add_request(prompt, ask(repair))
    for _ in range(3):
        engine.step()
    assert request.is_measuring and not request.answers[0].token_ids
    return request


@pytest.mark.parametrize("repair", MEASURED)
def test_aborted_while_it_measures_it_holds_nothing(repair):
    engine = build_engine(llama(), max_batched_tokens=9)
    engine.abort(measuring(engine, repair).request_id)
    assert_only_the_cache_holds_blocks(engine)
    assert token_ids(answer(engine, PROMPT, ask(repair))[0]) == alone(repair)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("repair", MEASURED)
def test_a_request_that_measures_goes_on_after_a_sleep(repair, level):
    engine = build_engine(llama(), max_batched_tokens=9)
    request = measuring(engine, repair)
    engine.sleep(level)
    while engine.has_work:
        engine.step()
    assert engine.is_asleep and not request.is_finished
    engine.wake()
    engine.run([request])
    engine.check_invariants()
    assert token_ids(request) == alone(repair)


@pytest.mark.parametrize("repair", MEASURED)
def test_a_step_that_fails_while_it_measures_ends_it_and_leaves_nothing(repair):
    engine = build_engine(llama(), max_batched_tokens=9, runner=RunnerThatFails)
    engine.runner.failing = {4}
    request = measuring(engine, repair)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.run([request])
    assert isinstance(request.error, EngineError)
    assert_only_the_cache_holds_blocks(engine)
    assert token_ids(answer(engine, PROMPT, ask(repair))[0]) == alone(repair)


@pytest.mark.parametrize("repair", REPAIRS)
def test_an_engine_on_a_thread_gives_the_same(repair):
    async def run():
        async with running(build_engine(llama(), max_batched_tokens=9)) as engine:
            return await asyncio.gather(*[read(engine, PROMPT, ask(repair)) for _ in range(2)])

    assert asyncio.run(run()) == [alone(repair)] * 2


# Text


TEXTS = [
    {"id": "ferry", "text": "The ferry goes to Oak Island."},
    {"id": "mill", "text": "The mill grinds oats for the island."},
    {"id": "zoo", "text": "It has three owls."},
]
MESSAGES = [{"role": "user", "content": "Where does it go?"}]
SMALL = EngineConfig(request_cache_size="4MiB", max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def chatting():
    return chatting_llama()


def open_llm(model, **options):
    return LLM(model, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="1MiB", **options), engine_config=SMALL)


@pytest.mark.parametrize("repair", ["first(4)", "query(0.2)", "full"])
def test_streams_logprobs_and_forms_go_with_repairs(chatting, repair):
    params = replace(GREEDY, repair=repair, logprobs=2, structured_outputs={"choice": ["to Oak Island", "to the mill"]})
    with open_llm(chatting) as llm:
        (whole,) = llm.chat(MESSAGES, params, documents=TEXTS)
        *_, streamed = llm.stream(MESSAGES, params, documents=TEXTS)
    assert streamed.outputs[0].token_ids == whole.outputs[0].token_ids
    assert streamed.outputs[0].text == whole.outputs[0].text and whole.outputs[0].text in "to Oak Island, to the mill"
    assert whole.outputs[0].logprobs is not None and len(whole.outputs[0].logprobs) == len(whole.outputs[0].token_ids)
    assert whole.reuse.repair is not None and whole.reuse.repair.policy == repair


@pytest.mark.parametrize("repair", ["first(4)", "query(0.2)", "full"])
def test_conversations_go_on_as_if_they_were_asked_anew(chatting, repair):
    params = replace(GREEDY, repair=repair, max_tokens=6)
    with open_llm(chatting) as llm, open_llm(chatting) as fresh:
        (first,) = llm.chat(MESSAGES, params, documents=TEXTS)
        turns = [
            *MESSAGES,
            {"role": "assistant", "content": first.outputs[0].text},
            {"role": "user", "content": "Why?"},
        ]
        (second,), (expected,) = (each.chat(turns, params, documents=TEXTS) for each in (llm, fresh))
    assert second.outputs[0].token_ids == expected.outputs[0].token_ids
    assert second.reuse.repair.repaired_tokens == expected.reuse.repair.repaired_tokens


def test_an_answer_may_be_repaired_otherwise_than_the_engine_says(chatting):
    with open_llm(chatting, repair="first(4)") as llm:
        (as_engine,) = llm.chat(MESSAGES, GREEDY, documents=TEXTS)
        (as_asked,) = llm.chat(MESSAGES, replace(GREEDY, repair="none"), documents=TEXTS)
    assert as_engine.reuse.repair is not None and as_engine.reuse.repair.policy == "first(4)"
    assert as_asked.reuse.repair is None


def test_without_a_chunk_cache_there_is_nothing_to_repair(chatting):
    with LLM(chatting, enable_chunk_cache=False, engine_config=SMALL) as llm:
        (output,) = llm.chat(MESSAGES, replace(GREEDY, repair="query(0.2)"), documents=TEXTS)
    assert output.reuse.repair is None and "exact" in output.reuse.composition
