"""The rule of a text without end, against its meaning written out token by token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.layout import RollingWindow

windows = st.builds(RollingWindow, st.integers(0, 9), st.integers(1, 12), st.integers(1, 4))


def keys_seen(window: RollingWindow, token: int) -> dict[int, int]:
    """What a token sees of the text, and from how far: sinks and newest tokens, side by side, itself last."""
    kept = [other for other in range(token + 1) if other < window.sink_tokens or token - other < window.window_tokens]
    return {other: len(kept) - 1 - place for place, other in enumerate(kept)}


@given(window=windows, token=st.integers(0, 200))
def test_a_token_sees_sinks_and_window_from_where_they_stand_side_by_side(window: RollingWindow, token: int) -> None:
    seen = keys_seen(window, token)
    oldest, lap, place = window.oldest(token), window.lap_start(token), window.position_of(token)
    assert 0 <= place < window.num_positions
    for other, distance in seen.items():
        moved = window.shift(token) if other < window.sink_tokens else -window.window_tokens if other < lap else 0
        assert place - (window.position_of(other) + moved) == distance
        assert other < window.sink_tokens or other >= oldest
    assert {other for other in range(token + 1) if other < window.sink_tokens or other >= oldest} == set(seen)


@given(window=windows, token=st.integers(0, 200))
def test_places_are_neighbours_within_a_lap_and_a_window_reaches_one_lap_back(
    window: RollingWindow, token: int
) -> None:
    first, end = window.lap_start(token), window.lap_end(token)
    assert first <= token < end
    assert [window.position_of(other) - window.position_of(first) for other in range(first, end)] == list(
        range(end - first)
    )
    assert window.lap_start(first) == first and window.lap_start(end) == end
    before = window.lap_start(first - 1) if first > 0 else 0
    assert window.oldest(token) >= before


@settings(max_examples=examples(60))
@given(window=windows, num_tokens=st.integers(1, 60))
def test_what_is_left_out_is_what_the_last_window_does_not_depend_on(window: RollingWindow, num_tokens: int) -> None:
    """Which keys matter is found by walking through the layers, token by token."""
    needed = {other for other in range(num_tokens) if num_tokens - other <= window.window_tokens}
    sinks = set(range(min(window.sink_tokens, num_tokens)))
    for _ in range(window.num_layers - 1):
        needed |= {other for token in needed | sinks for other in keys_seen(window, token)}
    behind = {token for token in needed if token >= window.sink_tokens}
    first = window.replay_from(num_tokens)
    assert not behind or first <= min(behind)
    if first > window.sink_tokens:
        assert first == min(behind) >= window.num_positions
    assert 1 <= window.head_tokens(num_tokens) <= min(num_tokens, max(window.num_positions, 1))


def test_an_endless_text_never_leaves_its_places() -> None:
    window = RollingWindow(4, 1020)
    assert max(window.position_of(token) for token in range(0, 50_000, 7)) < 1024
    assert window.oldest(50_000) == 48_981 and window.shift(1023) == 0
