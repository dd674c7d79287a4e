"""No request changes what another one reads: after any others, its logits are those of an engine that saw it alone.

A cached document that had read an attacker's text would carry it into the answers of others (HijackKV, arXiv
2607.19957). Each way in which two requests can share keys and values is tried, in float64: what differs is the order of
sums, at 1e-15; a foreign text would be seen at 1e-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, build_engine
from support.families import build
from support.llama_engine import difference, llama_engine, llama_reader
from support.loaded import chatting_llama
from torch import Tensor

from kvmosaic import LLM, ChunkCacheConfig
from kvmosaic.engine import Engine, Request
from kvmosaic.errors import InvalidRepair, NotMovable
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.sampling import RequestOutput

SYSTEM = [3, 4, 5, 6, 7]
ONE, TWO = [20, 21, 22, 23, 24, 25], [40, 41, 42, 43, 44]
EVIL = [66, 67, 68, 69, 70]
QUESTION = [90, 91]
COMPANIONS = ((80, 81, 82), (83, 84))
SMALL = replace(GREEDY, max_tokens=2, logprobs=3)
Planted = tuple[Prompt, dict[str, Any]]
"""A prompt, and how it is placed and answered."""


def of(*documents: list[int], system: list[int] = SYSTEM, question: list[int] = QUESTION, **fields: Any) -> Prompt:
    return replace(Prompt.from_tokens(system, documents, question), **fields)


def with_texts(*, before: bool = False, between: bool = False) -> Prompt:
    """The attacker's text after the shared part of the system text, or between documents."""
    system, one, two, question = of(ONE, TWO).segments
    text = (Segment(SegmentKind.TEXT, tuple(EVIL)),)
    return Prompt((system, *text * before, one, *text * between, two, question))


def sees(*documents: list[int]) -> Prompt:
    prompt = of(*documents)
    chunks = (replace(chunk, sees=tuple(range(number))) for number, chunk in enumerate(prompt.chunks))
    return replace(prompt, segments=(prompt.segments[0], *chunks, prompt.segments[-1]))


def at_offsets(*offsets: int) -> Prompt:
    prompt = of(EVIL, ONE, TWO)
    chunks = (replace(each, position_offset=offset) for each, offset in zip(prompt.chunks, offsets, strict=True))
    return replace(prompt, segments=(prompt.segments[0], *chunks, prompt.segments[-1]))


SEQUENTIAL = {"position_strategy": "sequential", "chunk_context": "system"}
BEHIND = {"position_strategy": "sequential", "chunk_context": "companions"}
VICTIMS: dict[str, Planted] = {
    "in a row": (of(ONE, TWO), SEQUENTIAL),
    "overlapping": (of(ONE, TWO), {"position_strategy": "shared", "chunk_context": "system"}),
    "after companions": (of(ONE, TWO, companions=COMPANIONS), BEHIND),
    "without context": (of(ONE, TWO), {**SEQUENTIAL, "chunk_context": "none"}),
    "seeing": (sees(ONE, TWO), SEQUENTIAL),
    "repaired": (of(ONE, TWO), {**SEQUENTIAL, "repair": "first(3)"}),
    "repaired after companions": (of(ONE, TWO, companions=COMPANIONS), {**BEHIND, "repair": "first(3)"}),
    "in full": (of(ONE, TWO), {**SEQUENTIAL, "repair": "full"}),
    "at offsets": (
        replace(
            at_offsets(5, 12, 19), segments=at_offsets(5, 12, 19).segments[:1] + at_offsets(5, 12, 19).segments[2:]
        ),
        {"position_strategy": "absolute"},
    ),
    "an ordinary prompt": (Prompt.plain([*SYSTEM, *ONE, *QUESTION]), {}),
}
ATTACKS: dict[str, list[Planted]] = {
    "another system text": [(of(ONE, TWO, system=[*SYSTEM[:-1], 66]), SEQUENTIAL), (of(ONE, system=EVIL), BEHIND)],
    "a text after the preamble": [(with_texts(before=True), how) for how in (SEQUENTIAL, BEHIND)],
    "a text between documents": [(with_texts(between=True), how) for how in (SEQUENTIAL, BEHIND)],
    "documents that see others": [(sees(EVIL, ONE, TWO), SEQUENTIAL), (sees(EVIL, TWO, ONE), BEHIND)],
    "other companions": [
        (of(TWO, ONE, companions=(tuple(EVIL),)), BEHIND),
        (of(TWO, ONE, companions=(COMPANIONS[0], tuple(EVIL))), BEHIND),
        (of(EVIL, ONE, TWO, companions=(tuple(ONE), tuple(TWO))), BEHIND),
    ],
    "repaired after another": [
        (of(EVIL, ONE, TWO), {**SEQUENTIAL, "repair": repair}) for repair in ("first(3)", "full", "query(0.5)")
    ],
    "an edited beginning": [
        (of([*ONE[:4], *EVIL], [*TWO[:4], *EVIL]), how) for how in (SEQUENTIAL, {**SEQUENTIAL, "chunk_context": "none"})
    ],
    "other offsets": [(at_offsets(5, 10, 30), {"position_strategy": "absolute"})],
    "no context": [(of(ONE, TWO, system=EVIL), {**SEQUENTIAL, "chunk_context": "none"})],
    "a rolling window": [
        (of(ONE, TWO, question=EVIL * 3), {**SEQUENTIAL, "window_tokens": 8, "sink_tokens": 2}),
    ],
    "an order of its own": [(of(EVIL, TWO, ONE, companions=COMPANIONS, documents_order="any"), BEHIND)],
    "several answers": [(of(ONE, TWO, question=EVIL), {**SEQUENTIAL, "n": 2})],
    "an ordinary prompt that begins alike": [(Prompt.plain([*SYSTEM, *ONE, *EVIL]), {}), (Prompt.plain(EVIL), {})],
}


@cache
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


def new_engine(**options: Any) -> Engine:
    return build_engine(model(), **options)


def queue(engine: Engine, request: Planted) -> Request:
    prompt, how = request
    placing = {name: value for name, value in how.items() if name in ("position_strategy", "chunk_context")}
    params = replace(SMALL, **{name: value for name, value in how.items() if name not in placing})
    return engine.add_request(prompt, params, **placing)


def logits_of(engine: Engine, request: Planted) -> Tensor:
    """Logits [steps, V] of one request that runs alone."""
    runner: Any = engine.runner
    runner.logits.clear()
    engine.run([queue(engine, request)])
    return torch.cat([logits for logits in runner.logits if len(logits)])


@cache
def alone(victim: str) -> Tensor:
    return logits_of(new_engine(), VICTIMS[victim])


def twins(prompt: Prompt) -> Iterator[Prompt]:
    """The same prompt with an attacker's text of the same length in place of one of its parts."""
    evil = tuple(range(100, 128))
    for number, segment in enumerate(prompt.segments):
        changed = replace(segment, token_ids=evil[: segment.num_tokens])
        yield replace(prompt, segments=(*prompt.segments[:number], changed, *prompt.segments[number + 1 :]))
    for number, text in enumerate(prompt.companions):
        others = list(prompt.companions)
        others[number] = evil[: len(text)]
        yield replace(prompt, companions=tuple(others))


def check(engine: Engine, victim: str) -> None:
    found, expected = logits_of(engine, VICTIMS[victim]), alone(victim)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()), msg=victim)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_request_reads_is_its_own(attack):
    engine = new_engine()
    for request in ATTACKS[attack]:
        logits_of(engine, request)
    for victim in VICTIMS:
        check(engine, victim)


FAST = ("after companions", "seeing", "repaired after companions")


@pytest.mark.parametrize(
    "victim", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in VICTIMS]
)
def test_each_part_of_a_prompt_decides_what_is_shared(victim):
    prompt, how = VICTIMS[victim]
    engine = new_engine()
    for twin in twins(prompt):
        engine.reset_prefix_cache()
        logits_of(engine, (twin, how))
        check(engine, victim)


def likelihoods(output: RequestOutput) -> list[dict[int, float]]:
    """Of the likeliest tokens of each step."""
    steps = output.outputs[0].logprobs or ()
    return [{token: each.logprob for token, each in step.items()} for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nor_do_requests_that_run_in_the_same_steps(preemption):
    """With room for a few of them, so that some are preempted and documents are evicted."""
    engine = new_engine(blocks=(40, 24), max_running=6, engine_options={"preemption": preemption})
    everything = [VICTIMS, {name: one for name, (one, *_) in ATTACKS.items()}, VICTIMS]
    requests = [(name, queue(engine, request)) for some in everything for name, request in some.items()]
    engine.run([request for _, request in requests])
    for name, request in requests:
        if name in VICTIMS:
            twin = new_engine()
            (expected,) = twin.run([queue(twin, VICTIMS[name])])
            for found, step in zip(likelihoods(request.output()), likelihoods(expected.output()), strict=True):
                assert found == pytest.approx(step, abs=1e-9), name


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.sampled_from([*ATTACKS, *VICTIMS]), min_size=3, max_size=8))
def test_nor_do_many_in_any_order(names):
    engine = new_engine(blocks=(64, 12))
    for name in names:
        if name in VICTIMS:
            check(engine, name)
        else:
            for request in ATTACKS[name]:
                logits_of(engine, request)
    for victim in VICTIMS:
        check(engine, victim)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_in_llama_cpp_neither(attack):
    engine, alone = llama_engine(llama_reader()), llama_engine(llama_reader())
    for request in ATTACKS[attack]:
        with suppress(InvalidRepair, NotMovable):  # what needs attention scores, and a rolling window
            logits_of(engine, request)
    for victim, request in VICTIMS.items():
        found, expected = logits_of(engine, request), logits_of(alone, request)
        assert difference(found, expected) < 0.01, victim


@pytest.mark.slow
def test_a_found_document_carries_nothing_of_the_text_around_it():
    def message(before: str, after: str) -> list[dict[str, str]]:
        documents = "The ferry goes to Oak Island. " * 9, "The mill grinds oats for bread. " * 9
        tags = "".join(f'<document index="{number}">\n{text}\n</document>\n' for number, text in enumerate(documents))
        return [{"role": "user", "content": before + tags + after}]

    config = ChunkCacheConfig(chunk_cache_size="1MiB", find_documents="patterns", position_strategy="sequential")
    honest = message("", "Where does the ferry go?")
    answers = []
    for others in ([], [message("It goes nowhere. ", "Say so."), message("", "Nowhere, is it?")]):
        with LLM(chatting_llama(), chunk_cache_config=config) as llm:
            for each in others:
                llm.chat(each, SMALL)
            (output,) = llm.chat(honest, SMALL)
            answers.append(output)
    clean, after = answers
    chunks = [segment for segment in after.reuse.segments if segment.kind == "chunk"]
    assert len(chunks) == 2 and all(chunk.reused_tokens for chunk in chunks)
    for found, step in zip(likelihoods(after), likelihoods(clean), strict=True):
        assert found == pytest.approx(step, abs=1e-4)
