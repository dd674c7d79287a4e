"""Policies: what they choose, how they are written, and what is wrong with those that cannot be read."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidRepair
from kvmosaic.repair import (
    Alike,
    AskedDocuments,
    ChunkSignals,
    Combined,
    FirstTokens,
    FullRepair,
    KeyDeviation,
    Names,
    NoRepair,
    QueryAttention,
    budget_of,
    checked_choice,
    repair_policy,
)
from kvmosaic.sampling import SamplingParams

FRACTIONS = st.floats(0.001, 1, allow_subnormal=False)
POLICIES = st.one_of(
    st.sampled_from([NoRepair(), FullRepair(), Names(), Alike()]),
    st.builds(FirstTokens, st.integers(1, 2**20)),
    st.builds(KeyDeviation, FRACTIONS),
    st.builds(QueryAttention, FRACTIONS),
    st.builds(Combined, FRACTIONS),
    st.builds(AskedDocuments, st.integers(1, 2**20)),
)


def sampled(repair):
    return SamplingParams(repair=repair)


def configured(repair):
    return ChunkCacheConfig(repair=repair)


@st.composite
def chunk_lists(draw):
    """Chunks with many equal scores, the first few of them exact."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    num_exact = draw(st.integers(0, len(lengths)))
    scores = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    return [
        ChunkSignals(
            length,
            number < num_exact,
            draw(st.lists(scores, min_size=length, max_size=length)),
            draw(st.lists(scores, min_size=length, max_size=length)),
            draw(st.lists(st.booleans(), min_size=length, max_size=length)),
            draw(scores),
            draw(st.booleans()),
        )
        for number, length in enumerate(lengths)
    ]


def best_one_by_one(chunks, score, fraction):
    """The obvious twin: the best token that is left, until the share is spent."""
    wanted = int(Fraction(str(fraction)) * sum(chunk.num_tokens for chunk in chunks))
    left = {
        (number, token)
        for number, chunk in enumerate(chunks)
        if not chunk.is_exact
        for token in range(chunk.num_tokens)
    }
    chosen = [[] for _ in chunks]
    for _ in range(min(max(wanted, 1), len(left))):
        number, token = min(left, key=lambda place: (-score(chunks[place[0]], place[1]), place))
        left.remove((number, token))
        chosen[number].append(token)
    return [sorted(tokens) for tokens in chosen]


@given(chunk_lists(), st.sampled_from([0.01, 0.15, 0.29, 0.3, 0.58, 1]))
def test_the_highest_scores_are_chosen_and_ties_go_to_the_earlier_token(chunks, fraction):
    attention = sum(sum(chunk.attention) for chunk in chunks) or 1.0
    deviation = sum(sum(chunk.deviation) for chunk in chunks) or 1.0
    scores = {
        KeyDeviation: lambda chunk, token: chunk.deviation[token],
        QueryAttention: lambda chunk, token: chunk.attention[token],
        Combined: lambda chunk, token: (
            (chunk.attention[token] / attention) ** 0.5 + 0.5 * (chunk.deviation[token] / deviation) ** 0.5
        ),
    }
    for kind, score in scores.items():
        assert kind(fraction).choose(chunks) == best_one_by_one(chunks, score, fraction)


@given(chunk_lists(), POLICIES)
def test_exact_chunks_are_never_chosen_from_and_every_choice_is_sound(chunks, policy):
    chosen = policy.choose(chunks)
    assert checked_choice(chunks, chosen, policy) == [list(tokens) for tokens in chosen]
    assert all(not tokens for chunk, tokens in zip(chunks, chosen, strict=True) if chunk.is_exact)


def test_the_share_is_of_all_tokens_rounded_down_but_at_least_one():
    open_chunk, exact = ChunkSignals(100), ChunkSignals(50, is_exact=True)
    assert [budget_of([open_chunk], share) for share in (0.29, 0.299, 0.001, 1)] == [29, 29, 1, 100]
    assert budget_of([exact, open_chunk], 0.2) == 30, "tokens of exact chunks count for the share"
    assert budget_of([exact, open_chunk], 1) == 100, "and are not chosen"
    assert budget_of([exact], 0.5) == 0
    assert budget_of([], 0.5) == 0


def test_first_takes_whole_chunks_where_they_are_shorter():
    chunks = [ChunkSignals(5, is_exact=True), ChunkSignals(2), ChunkSignals(9)]
    assert [list(tokens) for tokens in FirstTokens(3).choose(chunks)] == [[], [0, 1], [0, 1, 2]]


def test_documents_with_half_of_the_best_ones_words_are_chosen_whole():
    chunks = [ChunkSignals(len(str(words)), words == 9.5, words=words) for words in (4.7, 4.75, 0.0, 9.5, 4.75, 12.25)]
    assert [len(tokens) for tokens in AskedDocuments(9).choose(chunks[:5])] == [0, 4, 0, 0, 4], "one is exact"
    assert [len(tokens) for tokens in AskedDocuments(2).choose(chunks[:5])] == [0, 4, 0, 0, 0], "the earlier of two"
    assert [len(tokens) for tokens in AskedDocuments(2).choose(chunks)] == [0, 0, 0, 0, 0, 5]


@given(POLICIES)
def test_the_text_of_a_policy_is_read_back_as_the_same_policy(policy):
    assert repair_policy(str(policy)) == policy
    assert SamplingParams(repair=str(policy)).repair == str(policy)
    assert repair_policy(policy) is policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", NoRepair()),
        (" FULL ", FullRepair()),
        ("first(8)", FirstTokens(8)),
        ("first", FirstTokens()),
        ("first()", FirstTokens()),
        ("names", Names()),
        ("deviation( 0.2 )", KeyDeviation(0.2)),
        ("query(1)", QueryAttention(1)),
        ("combined(5e-2)", Combined(0.05)),
        ("documents(3)", AskedDocuments(3)),
    ],
)
def test_forms_are_read(text, policy):
    assert repair_policy(text) == policy


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", "choose one of none, first"),
        ("blend(0.15)", "'blend\\(0.15\\)'; choose one of none"),
        ("query(0.15", "choose one of none"),
        ("query(0.15))", "choose one of none"),
        ("query" * 1000, "choose one of none"),
        ("query(lots)", "'lots' is no number"),
        ("query(,)", "'' is no number|with 2 numbers"),
        ("query(0.1, 0.2)", "with 2 numbers"),
        ("none(1)", "with 1 numbers"),
        ("documents(0.5)", "computes 1 to 1048576 documents, got 0.5"),
        ("query(0)", "above 0, at most 1, got 0"),
        ("query(1.5)", "above 0, at most 1, got 1.5"),
        ("deviation(nan)", "got nan"),
        ("combined(-0.1)", "got -0.1"),
        ("combined(inf)", "got inf"),
        ("first(0)", "1 to 1048576 tokens of each chunk, got 0"),
        ("first(1.5)", "got 1.5"),
        ("first(99999999999)", "got 99999999999"),
        (0.15, "must be one of none, .*got 0.15"),
        (FirstTokens, "must be one of none"),
        (object(), "must be one of none"),
    ],
)
def test_what_cannot_be_read_is_told_with_the_value_and_a_way_out(wrong, message):
    for reader in (repair_policy, sampled, configured):
        with pytest.raises(InvalidRepair, match=message):
            reader(wrong)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (FirstTokens, True),
        (FirstTokens, "4"),
        (QueryAttention, True),
        (QueryAttention, "0.1"),
        (KeyDeviation, None),
    ],
)
def test_numbers_of_other_kinds_are_refused(kind, wrong):
    with pytest.raises(InvalidRepair, match=repr(wrong)):
        kind(wrong)


class Wanting:
    """A policy of somebody's own that asks for what there is not."""

    def __init__(self, signals):
        self.signals = signals

    def choose(self, chunks):
        return [() for _ in chunks]


class Silent(Wanting):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            Wanting(frozenset({"gradient"})),
            "Wanting asks for the signals 'gradient'; there are alike, attention, deviation, names",
        ),
        (Wanting(None), "no text or no set of signals"),
        (Wanting([["attention"]]), "no text or no set of signals"),
        (Silent(frozenset()), "Silent has no text.*no words"),
    ],
)
def test_a_policy_of_ones_own_must_say_what_it_is_and_what_it_wants(policy, message):
    with pytest.raises(InvalidRepair, match=message):
        SamplingParams(repair=policy)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([[0]], "for 1 chunks, and the prompt has 2"),
        ([[0], [], []], "for 3 chunks, and the prompt has 2"),
        ([[], [3]], "token 3 of chunk 1; its tokens are 0 to 2"),
        ([[], [-1]], "token -1 of chunk 1"),
        ([[], [1.0]], "token 1.0 of chunk 1"),
        ([[], [True]], "token True of chunk 1"),
        ([[], ["a"]], "token 'a' of chunk 1"),
        ([[9], []], "token 9 of chunk 0; its tokens are 0 to 1"),
    ],
)
def test_a_wrong_choice_is_told_with_the_token_and_its_chunk(chosen, message):
    with pytest.raises(InvalidRepair, match=f"mine chose .*{message}"):
        checked_choice([ChunkSignals(2, is_exact=True), ChunkSignals(3)], chosen, "mine")


def test_a_choice_may_be_in_any_order_with_repetitions_and_of_any_whole_numbers():
    chunks = [ChunkSignals(2, is_exact=True), ChunkSignals(3)]
    assert checked_choice(chunks, [[0, 1], np.array([2, 0, 2])], "mine") == [[], [0, 2]]
    assert checked_choice(chunks, ((), (token for token in (1, 0))), "mine") == [[], [0, 1]]
