"""Order of documents that the cache chooses: the one of all orders that computes the fewest tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.engine.placement import first_documents, in_best_order
from kvmosaic.errors import InvalidPrompt
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt

SYSTEM, QUESTION = [3, 4, 5], [90]
TEXTS = {number: [10 * number + 10, *range(100, 100 + 3 * number + 2)] for number in range(5)}
NUMBERS = st.permutations(range(5)).flatmap(lambda numbers: st.integers(1, 4).map(lambda count: numbers[:count]))


def prompt_of(numbers: list[int], companions: int = 1) -> Prompt:
    prompt = Prompt.from_tokens(SYSTEM, [TEXTS[number] for number in numbers], QUESTION)
    return replace(prompt, companions=tuple((70 + number, 71) for number in range(companions)))


def layout_of(prompt: Prompt):
    return arrange(prompt, "sequential", "companions")


def new_cache() -> KVCache:
    config = ChunkCacheConfig(block_size=4)
    return KVCache("model", config, request_blocks=64, chunk_blocks=256)


def num_computed(kv_cache: KVCache, prompt: Prompt) -> int:
    return sum(span.num_to_compute for span in kv_cache.plan(layout_of(prompt)).spans if span.is_chunk)


def answer(kv_cache: KVCache, prompt: Prompt) -> None:
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(prompt)))
    kv_cache.begin_step()
    for index, span in enumerate(allocation.spans):
        if span.can_advance:
            kv_cache.advance(allocation, index, span.num_tokens - span.num_computed)
    kv_cache.end_step()
    kv_cache.release(allocation)


@given(
    st.integers(1, 3).flatmap(
        lambda places: st.lists(
            st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=places + 1, max_size=places + 1
        )
    )
)
def test_no_order_computes_less(missing):
    def cost(order: tuple[int, ...]) -> int:
        return sum(missing[min(place, len(missing) - 1)][number] for place, number in enumerate(order))

    chosen = first_documents(missing)
    rest = [number for number in range(4) if number not in chosen]
    orders = sorted(permutations(range(4)), key=cost)
    assert cost((*chosen, *rest)) == cost(orders[0])
    if len({cost(order) for order in orders}) == 1:
        assert (*chosen, *rest) == tuple(range(4)), "without a reason, documents stay as they were sent"


@given(st.lists(NUMBERS, max_size=3), NUMBERS, st.integers(1, 3))
def test_of_what_the_cache_has_the_most_is_reused(before, numbers, companions):
    kv_cache = new_cache()
    for each in before:
        answer(kv_cache, prompt_of(each, companions))
    prompt = prompt_of(numbers, companions)
    chosen = in_best_order(prompt, layout_of(prompt), kv_cache)
    assert sorted(chunk.token_ids for chunk in chosen.chunks) == sorted(chunk.token_ids for chunk in prompt.chunks)
    assert (chosen.segments[0], chosen.segments[-1]) == (prompt.segments[0], prompt.segments[-1])
    fewest = min(num_computed(kv_cache, prompt_of(list(order), companions)) for order in permutations(numbers))
    assert num_computed(kv_cache, chosen) == fewest
    answer(kv_cache, chosen)
    again = in_best_order(prompt, layout_of(prompt), kv_cache)
    assert num_computed(kv_cache, again) == 0


def test_parts_of_a_document_stay_together():
    kv_cache = new_cache()
    system, one, two, other, question = prompt_of([1, 2, 3]).segments
    parts = (replace(one, part=(1, 2), name="m"), replace(two, part=(2, 2), name="m", document_offset=one.num_tokens))
    prompt = replace(prompt_of([3]), segments=(system, *parts, other, question))
    answer(kv_cache, prompt)
    answer(kv_cache, prompt_of([3, 4]))
    assert in_best_order(prompt, layout_of(prompt), kv_cache) == prompt
    turned = replace(prompt, segments=(system, other, *parts, question))
    kv_cache = new_cache()
    answer(kv_cache, prompt)
    assert in_best_order(turned, layout_of(turned), kv_cache) == prompt


@pytest.mark.parametrize("kind", ["texts between", "sees", "found"])
def test_an_order_that_means_something_stays(kind):
    kv_cache = new_cache()
    answer(kv_cache, prompt_of([1, 2]))
    system, two, one, question = prompt_of([2, 1]).segments
    text = replace(question, kind="text")
    if kind == "sees":
        one = replace(one, sees=(0,))
    if kind == "found":
        one = replace(one, origin="pattern open-webui")
    between = (text,) if kind == "texts between" else ()
    prompt = replace(prompt_of([2, 1]), segments=(system, two, *between, one, question))
    assert in_best_order(prompt, layout_of(prompt), kv_cache) is prompt


def test_only_two_orders_have_a_name():
    with pytest.raises(InvalidPrompt, match="choose 'sent' or 'any'"):
        replace(prompt_of([1]), documents_order="best")
