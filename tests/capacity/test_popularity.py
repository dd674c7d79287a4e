"""Che's approximation against caches that are run."""

from __future__ import annotations

import bisect
import random
from collections import OrderedDict
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.capacity.demand import Ranks, best_hit_rate, drawn_together, hit_rate, with_host, zipf_ranks


def simulated(documents: int, exponent: float, kept: int, together: int, draws: int = 90_000) -> float:
    """Hit rate of a cache that lets the least recently used leave; each prompt draws different documents."""
    chance, cache = random.Random(1), OrderedDict[int, None]()
    bounds = list(accumulate(rank**-exponent for rank in range(1, documents + 1)))
    hits = asked = 0
    for number in range(draws // together):
        prompt: set[int] = set()
        while len(prompt) < together:
            prompt.add(bisect.bisect(bounds, chance.random() * bounds[-1]))
        for document in prompt:
            is_warm = number * together > draws // 3
            asked += is_warm
            hits += is_warm and document in cache
            cache[document] = None
            cache.move_to_end(document)
            if len(cache) > kept:
                cache.popitem(last=False)
    return hits / asked


@pytest.mark.parametrize(
    ("documents", "exponent", "kept", "together"),
    [(1_000, 1.0, 100, 1), (1_000, 0.6, 300, 1), (1_000, 1.3, 20, 1), (1_500, 1.0, 150, 5), (500, 1.0, 100, 20)],
)
def test_expected_hit_rate_is_that_of_a_cache_that_is_run(
    documents: int, exponent: float, kept: int, together: int
) -> None:
    ranks = drawn_together(zipf_ranks(documents, exponent), together)
    assert hit_rate(ranks, kept) == pytest.approx(simulated(documents, exponent, kept, together), abs=0.015)


@pytest.mark.parametrize(
    ("exponent", "on_device", "in_host"),
    [(1.0, 50, 200), (1.0, 200, 200), (1.0, 100, 50), (0.7, 50, 500), (0.6, 200, 200)],
)
def test_a_host_tier_adds_what_it_adds_to_a_cache_that_is_run(exponent: float, on_device: int, in_host: int) -> None:
    documents, chance = 1_000, random.Random(2)
    bounds = list(accumulate(rank**-exponent for rank in range(1, documents + 1)))
    device, host = OrderedDict[int, None](), OrderedDict[int, None]()
    hits = 0
    for number in range(90_000):
        document = bisect.bisect(bounds, chance.random() * bounds[-1])
        hits += number >= 30_000 and (document in device or document in host)
        if document not in device and document in host:
            host.move_to_end(document)
        device[document] = None
        device.move_to_end(document)
        if len(device) > on_device:
            evicted, _ = device.popitem(last=False)
            host[evicted] = None
            host.move_to_end(evicted)
        if len(host) > in_host:
            host.popitem(last=False)
    expected = hit_rate(zipf_ranks(documents, exponent), with_host(on_device, in_host))
    assert expected == pytest.approx(hits / 60_000, abs=0.025)


@given(st.integers(1, 20_000), st.floats(0, 3))
def test_grouped_ranks_are_all_documents_and_all_of_their_popularity(count: int, exponent: float) -> None:
    ranks = zipf_ranks(count, exponent)
    assert sum(group.count for group in ranks) == pytest.approx(count)
    assert sum(group.count * group.probability for group in ranks) == pytest.approx(1)
    assert len(ranks) <= 1_000 + 400


def test_groups_give_what_single_ranks_give() -> None:
    weights = [rank**-0.9 for rank in range(1, 5_001)]
    single = [Ranks(1.0, weight / sum(weights)) for weight in weights]
    for kept in (50, 2_500):
        assert hit_rate(zipf_ranks(5_000, 0.9), kept) == pytest.approx(hit_rate(single, kept), abs=1e-4)


@settings(max_examples=examples(40))
@given(st.integers(1, 1_500), st.floats(0, 3), st.data())
def test_more_room_never_hurts_and_nothing_beats_the_most_popular(
    count: int, exponent: float, data: st.DataObject
) -> None:
    less, more = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    ranks = zipf_ranks(count, exponent)
    assert hit_rate(ranks, less) <= hit_rate(ranks, more) + 1e-9
    assert hit_rate(ranks, less) <= best_hit_rate(ranks, less) + 1e-6
    assert hit_rate(ranks, count) == 1.0 and hit_rate(ranks, 0) == 0.0


def test_all_alike_are_found_as_often_as_there_is_room() -> None:
    assert hit_rate(zipf_ranks(1_000, 0.0), 250) == pytest.approx(0.25)
    everything = drawn_together(zipf_ranks(10, 2.0), 10)
    assert [group.probability for group in everything] == pytest.approx([0.1] * 10)
