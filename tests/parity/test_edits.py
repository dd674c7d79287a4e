"""Edited documents: the tokens before the edit are kept, and the logits are those of the new text, read in full."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, answer, build_engine, dense_logits, fragment, token_ids
from support.families import build
from support.parity import engine_of_a_run, settings_of_a_run

from kvmosaic.engine import Engine
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, SegmentKind

FAMILIES = ("llama", "gemma3", "deepseek_v3", "gpt_oss")
"""Full attention; windows with two rotations; latent attention; windows with sinks."""
SYSTEM, QUESTION = list(range(5, 12)), [3, 4, 5]


@cache
def loaded(family: str = "llama") -> LoadedModel:
    return LoadedModel.from_module(build(family, torch.float64))


@st.composite
def edited_documents(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A document before and after an edit at its start, at a block border, inside, or at its end."""
    before = draw(st.lists(st.integers(0, 127), min_size=2, max_size=50))
    first = draw(st.sampled_from([0, 1, 4, 8, 16, 32, len(before) - 1, len(before)]) | st.integers(0, 50))
    first = min(first, len(before))
    removed, inserted = draw(st.integers(0, 20)), draw(st.lists(st.integers(0, 127), max_size=20))
    after = before[:first] + inserted + before[first + removed :]
    return before, after or [1]


def num_kept(before: list[int], after: list[int], block_size: int) -> int:
    """Tokens in the full blocks before the edit; the last token is computed in any case."""
    alike = next((n for n, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), None)
    alike = min(len(before), len(after)) if alike is None else alike
    return min(alike, len(after) - 1) // block_size * block_size


def prompt_of(*documents: list[int], offset: int | None = None) -> Prompt:
    prompt = Prompt.from_tokens(SYSTEM, documents, QUESTION)
    if offset is None:
        return prompt
    segments = (
        replace(segment, position_offset=offset) if segment.kind is SegmentKind.CHUNK else segment
        for segment in prompt.segments
    )
    return replace(prompt, segments=tuple(segments))


def check_edit(engine: Engine, model: LoadedModel, strategy: str, context: str, before: Prompt, after: Prompt) -> None:
    """The edited prompt gives the logits of a dense forward and of an engine that never saw the old text."""
    answer(engine, before)
    num_used = engine.kv_cache.chunk_pool.num_used
    edited, logits = answer(engine, after)
    expected = dense_logits(model, arrange(after, strategy, context), token_ids(edited))
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    block_size = engine.kv_cache.config.block_size
    old, new = (list(p.segments[1].token_ids or ()) for p in (before, after))
    segment = edited.reuse.segments[1]
    if old != new:
        texts = [list(p.token_ids or ()) for p in before.segments if p.kind is SegmentKind.CHUNK]
        kept = max(num_kept(text, new, block_size) for text in texts)
        assert segment.reused_tokens == kept
        assert (segment.action == "partly reused") == bool(kept)
        blocks = engine.kv_cache.chunk_pool.blocks_for(len(new)) - kept // block_size
        assert engine.kv_cache.chunk_pool.num_used == num_used + blocks, "shared blocks are stored once"
    again, warm = answer(engine, after)
    assert token_ids(again) == token_ids(edited)
    torch.testing.assert_close(warm, logits, atol=1e-10, rtol=0)
    old_again, old_logits = answer(engine, before)
    expected = dense_logits(model, arrange(before, strategy, context), token_ids(old_again))
    torch.testing.assert_close(old_logits, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(documents=edited_documents(), **settings_of_a_run)
def test_an_edited_document_gives_the_logits_of_the_new_text(
    family, documents, strategy, context, block_size, budget, fragmented
):
    before, after = documents
    engine = engine_of_a_run(loaded(family), strategy, context, block_size, budget, fragmented)
    other = [120, 121, 122]
    check_edit(engine, loaded(family), strategy, context, prompt_of(before, other), prompt_of(after, other))


@settings(max_examples=10)
@given(documents=edited_documents(), offset=st.integers(len(SYSTEM), 90), block_size=st.sampled_from([1, 4]))
def test_an_edited_document_at_its_own_offset_gives_the_logits_of_the_new_text(documents, offset, block_size):
    engine = build_engine(loaded(), position_strategy="absolute", block_size=block_size)
    before, after = (prompt_of(document, offset=offset) for document in documents)
    check_edit(engine, loaded(), "absolute", "system", before, after)


BEFORE = [10 + n % 90 for n in range(40)]
AFTER = [*BEFORE[:30], 1, 2, 3, *BEFORE[30:]]


def expected_logits(prompt: Prompt, tokens: list[int]) -> torch.Tensor:
    return dense_logits(loaded(), arrange(prompt, "shared", "system"), tokens)


@pytest.mark.parametrize("gone", [BEFORE, AFTER])
def test_the_other_text_stays_right_when_one_is_deleted(gone):
    engine = build_engine(loaded(), blocks=(128, 30))
    answer(engine, prompt_of(BEFORE))
    answer(engine, prompt_of(AFTER))
    kv_cache = engine.kv_cache
    assert kv_cache.chunk_pool.num_used == 10 + 11 - 7
    key = next(chunk.key for chunk in kv_cache.chunks() if list(chunk.token_ids) == gone)
    kv_cache.delete(key)
    engine.check_invariants()
    answer(engine, prompt_of([7] * 60))  # fills all blocks that are free
    left = AFTER if gone is BEFORE else BEFORE
    request, logits = answer(engine, prompt_of(left))
    assert request.reuse.segments[1].action == "reused"
    torch.testing.assert_close(logits, expected_logits(prompt_of(left), token_ids(request)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_eviction_of_the_old_text_keeps_the_new_one(eviction):
    engine = build_engine(loaded(), blocks=(128, 15), eviction=eviction)
    answer(engine, prompt_of(BEFORE))
    answer(engine, prompt_of(AFTER))
    request, _ = answer(engine, prompt_of(AFTER, [7] * 8))
    assert [segment.action for segment in request.reuse.segments[1:3]] == ["reused", "computed"]
    texts = [list(chunk.token_ids) for chunk in engine.kv_cache.chunks()]
    assert BEFORE not in texts and AFTER in texts
    request, logits = answer(engine, prompt_of(AFTER))
    torch.testing.assert_close(logits, expected_logits(prompt_of(AFTER), token_ids(request)), atol=1e-10, rtol=0)


def test_a_text_that_fits_only_without_the_old_one_is_computed_whole():
    engine = build_engine(loaded(), blocks=(128, 12))
    answer(engine, prompt_of(BEFORE))
    request, logits = answer(engine, prompt_of(AFTER))
    assert request.reuse.segments[1].reused_tokens == 0 and len(engine.kv_cache.chunks()) == 1
    torch.testing.assert_close(logits, expected_logits(prompt_of(AFTER), token_ids(request)), atol=1e-10, rtol=0)


def test_requests_on_both_texts_run_together():
    engine = build_engine(loaded(), max_batched_tokens=16)
    fragment(engine)
    prompts = [prompt_of(BEFORE), prompt_of(AFTER), prompt_of(BEFORE, AFTER), prompt_of(AFTER, BEFORE)]
    alone = [token_ids(answer(build_engine(loaded()), prompt)[0]) for prompt in prompts]
    answer(engine, prompts[0])
    running = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    aborted = engine.add_request(prompt_of([*BEFORE[:20], 9, 9, 9, 9, 9, 9, 9]), GREEDY)
    engine.step()
    engine.check_invariants()
    engine.abort(aborted.request_id)
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    assert [token_ids(request) for request in running] == alone
    engine.kv_cache.reset()
    engine.check_invariants()
    assert not engine.kv_cache.chunks() and not len(engine.kv_cache._chunks.shared)


def test_a_text_in_computation_is_shared():
    engine = build_engine(loaded())
    first, second = (engine.add_request(prompt_of(document), GREEDY) for document in (BEFORE, AFTER))
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    assert first.reuse.segments[1].reused_tokens == 0
    assert second.reuse.segments[1].reused_tokens == 28
    assert token_ids(second) == token_ids(answer(build_engine(loaded()), prompt_of(AFTER))[0])


def test_a_text_kept_before_a_failed_step_is_never_shared(monkeypatch):
    engine = build_engine(loaded())
    engine.add_request(prompt_of(BEFORE), GREEDY)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "run", fail)
        with pytest.raises(RuntimeError):
            engine.step()
    request, logits = answer(engine, prompt_of(AFTER))
    assert request.reuse.segments[1].action == "computed"
    torch.testing.assert_close(logits, expected_logits(prompt_of(AFTER), token_ids(request)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("repair", ["first(2)", "query(0.25)"])
def test_repaired_documents_are_edited_alike(repair):
    engine, fresh = (build_engine(loaded(), repair=repair) for _ in range(2))
    other = [120, 121, 122, 123, 124]
    answer(engine, prompt_of(BEFORE, other))
    edited, logits = answer(engine, prompt_of(AFTER, other))
    expected, expected_steps = answer(fresh, prompt_of(AFTER, other))
    assert token_ids(edited) == token_ids(expected)
    torch.testing.assert_close(logits[-1], expected_steps[-1], atol=1e-10, rtol=0)


def test_the_report_says_what_was_kept():
    engine = build_engine(loaded())
    answer(engine, prompt_of(BEFORE))
    request, _ = answer(engine, prompt_of(AFTER))
    segment = request.reuse.segments[1]
    assert (segment.action, segment.reused_tokens, segment.computed_tokens) == ("partly reused", 28, 15)
    assert segment.note == "first 28 of 43 tokens kept from an earlier text"


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(sections=st.lists(st.integers(1, 20), min_size=2, max_size=5), data=st.data(), **settings_of_a_run)
def test_sections_of_an_edited_document_give_the_logits_of_the_new_text(
    family, sections, data, strategy, context, block_size, budget, fragmented
):
    def prompt(lengths: list[int]) -> Prompt:
        documents = [[10 * number + n % 10 for n in range(length)] for number, length in enumerate(lengths)]
        whole = Prompt.from_tokens(SYSTEM, documents, QUESTION)
        segments, offset = list(whole.segments), 0
        for number, length in enumerate(lengths):
            part = (number + 1, len(lengths))
            segments[number + 1] = replace(segments[number + 1], part=part, document_offset=offset, is_section=True)
            offset += length
        return replace(whole, segments=tuple(segments))

    engine = engine_of_a_run(loaded(family), strategy, context, block_size, budget, fragmented)
    edited = data.draw(st.integers(0, len(sections) - 1))
    lengths = [length + (number == edited) for number, length in enumerate(sections)]
    before, after = prompt(sections), prompt(lengths)
    for each in (before, after):
        request, logits = answer(engine, each)
        expected = dense_logits(loaded(family), arrange(each, strategy, context), token_ids(request))
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    computed = [number for number, segment in enumerate(request.reuse.segments[1:-1]) if segment.computed_tokens]
    assert computed == [edited]
