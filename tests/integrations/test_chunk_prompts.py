"""Where the tokens of a composed prompt come from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.layout import Layout
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.scheduler.chunk_prompts import (
    first_private_block,
    recomputed_runs,
    repaired_runs,
    take_apart,
)

COMPOSITIONS = st.builds(
    lambda system, chunks, strategy, context, texts, companions: Composition(
        *(system, tuple(chunks), strategy, context), texts=tuple(texts[: len(chunks)]), companions=companions
    ),
    st.integers(0, 40),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from(["sequential", "shared"]),
    st.sampled_from(["system", "companions", "none"]),
    st.lists(st.sampled_from([0, 0, 1, 7, 33]), min_size=5, max_size=5),
    st.sampled_from([(), ((5,) * 20,), ((5,) * 3, (6,) * 17, (7,) * 16)]),
)
SIZES = st.sampled_from([1, 4, 16, 32])


def laid_out(composition: Composition, vocabulary: int = 1000, seed: int = 0) -> tuple[Layout, list[int]]:
    tokens = [(seed >> (i % 29)) + i % vocabulary + 10 for i in range(composition.end + 1)]
    return composition.layout(tokens), tokens


def parts(composition: Composition) -> list[tuple[str, int, int]]:
    """Kind, start and length of what is before the question."""
    found, start = [("system", 0, composition.system)], composition.system
    for text, chunk in zip(composition.texts or (0,) * len(composition.chunks), composition.chunks, strict=True):
        found += [("text", start, text), ("chunk", start + text, chunk)]
        start += text + chunk
    return [part for part in found if part[2]]


@given(COMPOSITIONS, SIZES, st.integers(2, 9), st.integers(0, 2**32))
def test_pieces_and_recomputed_texts_cover_the_prompt_in_order_and_hold_its_tokens(
    composition: Composition, block_size: int, vocabulary: int, seed: int
) -> None:
    layout, tokens = laid_out(composition, vocabulary, seed)
    prompts, pieces = take_apart(layout, block_size)
    covered = [(piece.start, piece.stop) for piece in pieces]
    covered += [(start, stop) for start, stop, _ in recomputed_runs(layout, 0, 0)]
    assert sorted(covered) == [(start, start + length) for _, start, length in parts(composition)]
    for piece in pieces:
        held = prompts[piece.prompt].token_ids[piece.offset : piece.offset + piece.stop - piece.start]
        assert list(held) == tokens[piece.start : piece.stop]
        assert piece.offset + piece.stop - piece.start <= prompts[piece.prompt].num_tokens
    assert {piece.prompt for piece in pieces} == set(range(len(prompts)))


@given(COMPOSITIONS, SIZES, st.data())
def test_a_chunk_that_is_repaired_as_a_whole_has_no_piece_unless_positions_are_shared(
    composition: Composition, block_size: int, data: st.DataObject
) -> None:
    whole = data.draw(st.sets(st.sampled_from(range(len(composition.chunks)))))
    repair = tuple((0, length) if number in whole else () for number, length in enumerate(composition.chunks))
    layout, _ = laid_out(composition)
    prompts, pieces = take_apart(layout, block_size, repair)
    assert {piece.prompt for piece in pieces} == set(range(len(prompts)))
    _, all_pieces = take_apart(layout, block_size)
    repaired = {} if layout.rules.overlaps else repaired_runs(layout, repair)
    assert [piece.span for piece in pieces] == [piece.span for piece in all_pieces if piece.span not in repaired]


@given(COMPOSITIONS, SIZES)
def test_chunk_prompts_are_whole_blocks_of_what_the_chunk_saw_and_the_chunk(
    composition: Composition, block_size: int
) -> None:
    layout, tokens = laid_out(composition)
    prompts, pieces = take_apart(layout, block_size)
    companions = composition.companions if composition.chunk_context == "companions" else ()
    chunks = [index for index, span in enumerate(layout.spans) if span.is_chunk]
    assert all(len(prompt.token_ids) % block_size == 0 for prompt in prompts)
    assert all(len(prompt.token_ids) - prompt.num_tokens < block_size for prompt in prompts)
    for piece in pieces:
        kind = layout.spans[piece.span].segment.kind
        if kind != "system":
            has_seen_system = composition.chunk_context != "none" or kind == "text"
            seen = tokens[: composition.system] if has_seen_system else []
            if kind == "chunk":  # document k after the first k companions
                seen += [token for text in companions[: chunks.index(piece.span)] for token in text]
            prompt = prompts[piece.prompt]
            assert list(prompt.token_ids[: prompt.num_tokens]) == [*seen, *tokens[piece.start : piece.stop]]
            assert piece.distance == layout.position_of(piece.span) - len(seen)
            assert prompt.is_text == (kind == "text")


def test_equal_chunks_share_one_chunk_prompt() -> None:
    layout = Composition(2, (3, 3, 3)).layout([1, 2, 7, 8, 9, 7, 8, 9, 7, 8, 8, 3])
    prompts, pieces = take_apart(layout, 4)
    assert len(prompts) == 2
    assert [piece.prompt for piece in pieces] == [0, 0, 0, 1]


@given(COMPOSITIONS, SIZES)
def test_no_block_with_a_token_that_saw_less_than_an_ordinary_one_is_public(
    composition: Composition, block_size: int
) -> None:
    """Tokens from the first chunk on that did not see everything before it differ from an ordinary prompt's."""
    layout, _ = laid_out(composition)
    differing = first_differing(composition)
    assert first_private_block(layout, block_size) == differing // block_size


def first_differing(composition: Composition) -> int:
    num_chunks = 0
    for kind, start, _ in parts(composition):
        seen = composition.system if composition.chunk_context != "none" else 0
        if kind == "chunk" and start != seen:
            return start
        num_chunks += kind == "chunk"
    return composition.end


@given(COMPOSITIONS, st.integers(0, 50), st.integers(0, 150))
def test_recomputed_runs_are_uncached_texts_after_chunks_and_first_tokens_of_chunks(
    composition: Composition, repair: int, num_cached: int
) -> None:
    layout, _ = laid_out(composition)
    expected, has_chunk = set(), False
    for kind, start, length in parts(composition):
        if kind == "text" and has_chunk:
            expected |= set(range(start, start + length))
        if kind == "chunk" and start >= first_differing(composition):
            expected |= set(range(start, start + min(repair, length)))
        has_chunk = has_chunk or kind == "chunk"
    runs = recomputed_runs(layout, repair, num_cached)
    assert {token for start, stop, _ in runs for token in range(start, stop)} == {
        token for token in expected if token >= num_cached
    }
    assert all(start < stop for start, stop, _ in runs)


def test_a_recomputed_text_is_where_the_question_sees_it() -> None:
    layout = Composition(4, (10, 6), "shared", texts=(3, 5)).layout(range(40))
    assert recomputed_runs(layout, 0, 0) == ((17, 22, 17),)
    assert recomputed_runs(layout, 0, 19) == ((19, 22, 19),)


def test_repaired_tokens_are_one_after_the_other_in_shared_positions_too() -> None:
    for strategy in ("sequential", "shared"):
        layout = Composition(4, (10, 6, 8), strategy).layout(range(40))
        assert recomputed_runs(layout, 2, 0) == ((14, 16, 14), (20, 22, 20))
