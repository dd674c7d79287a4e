"""Where the tokens of a composed prompt come from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.integrations.vllm.contract import Composition
from kvmosaic.integrations.vllm.scheduler.chunk_prompts import first_private_block, repaired_runs, take_apart

COMPOSITIONS = st.builds(
    lambda system, chunks, strategy, context, repair: Composition(system, tuple(chunks), strategy, context, repair),
    st.integers(0, 40),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from(["sequential", "shared"]),
    st.sampled_from(["system", "none"]),
    st.integers(0, 50),
)
SIZES = st.sampled_from([1, 4, 16, 32])


@given(COMPOSITIONS, SIZES, st.integers(2, 9), st.integers(0, 2**32))
def test_pieces_cover_the_prompt_in_order_and_hold_its_tokens(
    composition: Composition, block_size: int, vocabulary: int, seed: int
) -> None:
    tokens = [(seed >> (i % 29)) % vocabulary + 10 for i in range(composition.end)]
    prompts, pieces = take_apart(composition, tokens, block_size)
    cursor = 0
    for piece in pieces:
        assert piece.start == cursor < piece.stop
        cursor = piece.stop
        held = prompts[piece.prompt].token_ids[piece.offset : piece.offset + piece.stop - piece.start]
        assert list(held) == tokens[piece.start : piece.stop]
        assert piece.offset + piece.stop - piece.start <= prompts[piece.prompt].num_tokens
    assert cursor == composition.end
    assert {piece.prompt for piece in pieces} == set(range(len(prompts)))


@given(COMPOSITIONS, SIZES)
def test_chunk_prompts_are_whole_blocks_of_what_the_chunk_saw_and_the_chunk(
    composition: Composition, block_size: int
) -> None:
    tokens = list(range(100, 100 + composition.end))
    prompts, pieces = take_apart(composition, tokens, block_size)
    assert all(len(prompt.token_ids) % block_size == 0 for prompt in prompts)
    assert all(len(prompt.token_ids) - prompt.num_tokens < block_size for prompt in prompts)
    for piece in pieces:
        if piece.chunk is not None:
            seen = tokens[: composition.system] if composition.chunk_context == "system" else []
            chunk = tokens[piece.start : piece.stop]
            assert list(prompts[piece.prompt].token_ids[: prompts[piece.prompt].num_tokens]) == [*seen, *chunk]
            assert piece.distance == composition.position_of(piece.chunk) - len(seen)


def test_equal_chunks_share_one_chunk_prompt() -> None:
    composition = Composition(2, (3, 3, 3))
    prompts, pieces = take_apart(composition, [1, 2, 7, 8, 9, 7, 8, 9, 7, 8, 8], 4)
    assert len(prompts) == 2
    assert [piece.prompt for piece in pieces] == [0, 0, 0, 1]


@given(COMPOSITIONS, SIZES)
def test_no_block_with_a_token_that_saw_less_than_an_ordinary_one_is_public(
    composition: Composition, block_size: int
) -> None:
    """Tokens of the second chunk on (the first, if it did not see the system text) differ from an ordinary prompt's."""
    differing = composition.system + (composition.chunks[0] if composition.chunk_context == "system" else 0)
    assert first_private_block(composition, block_size) == differing // block_size
    assert first_private_block(composition, block_size) * block_size <= differing


@given(COMPOSITIONS, st.integers(0, 150))
def test_repaired_runs_are_the_first_tokens_of_chunks_that_are_not_cached(
    composition: Composition, num_cached: int
) -> None:
    expected = set()
    for chunk, (start, length) in enumerate(zip(composition.starts, composition.chunks, strict=True)):
        if chunk or composition.chunk_context == "none":
            expected |= set(range(start, start + min(composition.repair, length)))
    runs = repaired_runs(composition, num_cached)
    assert {token for start, stop in runs for token in range(start, stop)} == {t for t in expected if t >= num_cached}
    assert all(start < stop for start, stop in runs)
