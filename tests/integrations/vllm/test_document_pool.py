"""The document pool over vLLM's own block pool, and in engines whose cache is short."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.vllm.asking import Ask, compose, difference, documents
from vllm.v1.core.block_pool import BlockPool

from kvmosaic.eviction import LRU, Priority
from kvmosaic.vllm.scheduler import document_pool
from kvmosaic.vllm.scheduler.block_store import BlockStore
from kvmosaic.vllm.scheduler.document_pool import Claim, DocumentPool, read_claims
from kvmosaic.vllm.scheduler.eviction_order import PrivateCopies

CLOSE = 1e-4
SIZE = 4


class Cache:
    """vLLM's block pool, and a document pool over it."""

    def __init__(self, num_blocks: int = 21, max_blocks: int = 10, step_blocks: int = 1, policy: Any = None) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=SIZE)
        self.store = BlockStore(self.pool)
        self.ticks = count(1)
        self.documents = DocumentPool(
            self.store, max_blocks, step_blocks, policy or LRU(), clock=lambda: float(next(self.ticks))
        )
        self._names = count()

    def run(self, num_blocks: int, hashes: list[bytes] | None = None) -> tuple[list[bytes], list[Any]]:
        """A request computes and caches so many blocks, as vLLM does, and finishes; their hashes, and they."""
        self.documents.before_alloc(num_blocks)
        blocks = self.pool.get_new_blocks(num_blocks)
        self.documents.on_alloc(num_blocks)
        hashes = hashes or [f"{next(self._names):032}".encode() for _ in blocks]
        self.pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, num_blocks, SIZE, 0)
        self.documents.on_free()
        self.pool.free_blocks(reversed(blocks))
        return hashes, blocks

    def document(self, num_blocks: int, label: str = "", claim: Claim | None = None) -> list[bytes]:
        """A document that is computed and used; the hashes of its blocks."""
        hashes, _ = self.run(num_blocks)
        self.use(hashes, label, claim)
        return hashes

    def use(self, hashes: list[bytes], label: str = "", claim: Claim | None = None) -> None:
        self.documents.use(hashes, len(hashes) * SIZE, label, claim)

    def cached(self, hashes: list[bytes]) -> bool:
        return self.store.find(hashes) is not None


def test_a_document_within_the_bound_outlives_what_was_used_later() -> None:
    cache = Cache()
    kept = cache.document(5)
    plain = [cache.run(3)[0] for _ in range(20)]
    assert cache.cached(kept) and not cache.cached(plain[0]) and cache.cached(plain[-1])
    without = Cache(max_blocks=0)
    gone = without.document(5)
    for _ in range(20):
        without.run(3)
    assert not without.cached(gone)


def test_documents_never_take_room_from_requests() -> None:
    """All blocks can be allocated at any time, and nothing is referenced between steps."""
    cache = Cache(max_blocks=20)
    known = [cache.document(4, f"d{number}", Claim(is_pinned=number < 2)) for number in range(4)]
    cache.documents.before_alloc()
    assert cache.pool.get_num_free_blocks() == 20
    cache.run(20)
    assert not any(map(cache.cached, known))
    cache.documents.before_alloc()
    assert len(cache.documents) == 0 and cache.documents.num_evicted == 4


def test_under_pressure_documents_leave_whole_and_the_pinned_one_last() -> None:
    cache = Cache(num_blocks=17, max_blocks=16)
    pinned = cache.document(4, "pinned", Claim(is_pinned=True))
    older, newer = cache.document(4), cache.document(4)
    cache.use(older)  # is now the newer one
    running: list[Any] = []

    def allocate(number: int) -> None:
        cache.documents.before_alloc(number)
        running.extend(cache.pool.get_new_blocks(number))
        cache.documents.on_alloc(number)

    allocate(4)
    assert all(map(cache.cached, (pinned, older, newer)))
    for taken, left in ((newer, (older, pinned)), (older, (pinned,)), (pinned, ())):
        allocate(1)
        assert not cache.cached(taken) and all(map(cache.cached, left))
        allocate(3)
        assert all(map(cache.cached, left))


def test_the_bound_is_kept_by_evicting_whole_documents_by_rank() -> None:
    cache = Cache(num_blocks=41, max_blocks=10, policy=Priority())
    low = cache.document(4, "low", Claim(0.1))
    high = cache.document(4, "high", Claim(0.9))
    for _ in range(3):
        cache.document(4, "", None)
        cache.documents.check_invariants()
    assert [each.name for each in cache.documents.in_order()][-1] == high[-1]
    assert low[-1] not in {each.name for each in cache.documents.in_order()}
    assert cache.documents.num_blocks == 8 and cache.documents.num_evicted == 3
    cache.documents.update({"high": Claim(0.0)})
    assert cache.documents.in_order()[0].name == high[-1]


def test_pins_hold_against_the_bound_and_take_half_of_it_at_most() -> None:
    cache = Cache(num_blocks=41, max_blocks=10)
    cache.document(4, "a", Claim(is_pinned=True))
    cache.document(4, "b", Claim(is_pinned=True))
    assert cache.documents.num_pinned == 1
    for _ in range(3):
        cache.document(4)
    assert [each.claims.keys() for each in cache.documents.in_order()][-1] == {"a"}
    cache.documents.update({"a": Claim()})
    assert cache.documents.num_pinned == 0
    cache.documents.update({"a": None})
    assert not any("a" in each.claims for each in cache.documents.in_order())
    cache.documents.check_invariants()


def test_a_text_that_two_stored_documents_share_stays_with_the_second() -> None:
    cache = Cache()
    hashes = cache.document(3, "one", Claim(0.2, is_pinned=True))
    cache.use(hashes, "two", Claim(0.7))
    cache.documents.update({"one": None})
    (left,) = cache.documents.in_order()
    assert (left.priority, left.is_pinned, set(left.claims)) == (0.7, False, {"two"})


def test_a_request_that_was_rendered_before_an_update_does_not_undo_it() -> None:
    cache = Cache(num_blocks=41, max_blocks=12)
    cache.documents.update({"a": Claim(0.8, is_pinned=True, change=7), "b": Claim(is_pinned=True, change=3)})
    early = cache.document(3, "a", Claim(change=6))
    (pooled,) = cache.documents.in_order()
    assert pooled.is_pinned and pooled.priority == 0.8, "the update came before the document was cached"
    cache.use(early, "a", Claim(change=8))
    assert not pooled.is_pinned, "unpinned since, which this engine was not told"
    cache.use(early, "a", Claim(is_pinned=True, change=7))
    assert not pooled.is_pinned, "this request is older than the one before"
    cache.documents.update({"a": Claim(is_pinned=True, change=9)})
    cache.documents.update({"a": Claim(change=8)})
    assert pooled.is_pinned, "updates may change places"
    deleted = cache.document(3, "b", Claim(is_pinned=True, change=3))
    assert cache.documents.num_pinned == 2
    cache.documents.update({"b": None})
    cache.run(3, deleted)
    cache.use(deleted, "b", Claim(is_pinned=True, change=3))
    assert cache.documents.num_pinned == 1, "a deleted document is pinned no more"
    cache.documents.check_invariants()


def test_few_updates_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_pool, "_MAX_UPDATES", 2)
    cache = Cache()
    for number, label in enumerate("abc"):
        cache.documents.update({label: Claim(is_pinned=True, change=5 + number)})
    assert list(cache.documents._updates) == ["b", "c"]


def test_a_reset_finds_nothing_in_use_and_empties_the_pool() -> None:
    cache = Cache()
    hashes = cache.document(4, "a", Claim(is_pinned=True))
    cache.documents.before_alloc()
    assert cache.pool.reset_prefix_cache()
    cache.use(hashes, "a", Claim(is_pinned=True))  # is not cached
    assert len(cache.documents) == 0 and cache.documents.num_evicted == 0
    cache.documents.check_invariants()


def test_a_document_above_the_bound_is_not_pooled() -> None:
    cache = Cache(max_blocks=4)
    small = cache.document(3)
    cache.document(5)
    assert [each.name for each in cache.documents.in_order()] == [small[-1]]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 4)), max_size=60))
def test_no_sequence_of_calls_breaks_the_pool(calls: list[tuple[int, int, int]]) -> None:
    cache = Cache(num_blocks=25, max_blocks=12)
    known: list[list[bytes]] = []
    for kind, number, which in calls:
        chosen = known[which % len(known)] if known else []
        if kind == 0:
            claim = Claim(which / 4, number == 2, number)
            known.append(cache.document(number, f"label {which}" if which else "", claim))
        elif kind == 1:
            cache.run(number)
        elif kind == 2 and chosen:
            if not cache.cached(chosen):
                cache.run(len(chosen), chosen)
            cache.use(chosen, f"label {which}", Claim(is_pinned=number > 3, change=number))
        elif kind == 3:
            cache.documents.update({f"label {which}": Claim(number / 6, number > 3, which) if number > 1 else None})
        elif kind == 4:
            cache.documents.before_alloc(number)
        elif number == 1:
            assert cache.pool.reset_prefix_cache()
            cache.documents.before_alloc()
        cache.documents.check_invariants()
        assert cache.pool.get_num_free_blocks() == 24 and not any(b.ref_cnt for b in cache.pool.blocks if not b.is_null)


def test_private_copies_are_evicted_before_what_was_computed_earlier() -> None:
    cache, copies = Cache(max_blocks=0), PrivateCopies()
    prefix, _ = cache.run(6)
    repeated, blocks = cache.run(6)
    copies.add(blocks[2:])
    copies.evict_first(cache.store, num_needed=1)
    assert len(copies) == 4, "8 blocks are empty"
    cache.run(8)
    copies.evict_first(cache.store, num_needed=1)
    assert len(copies) == 0 and cache.cached(repeated), "an exact repeat hits them"
    cache.run(1)
    assert cache.cached(repeated[:5]) and not cache.cached(repeated), "the tail first"
    cache.run(3)
    assert cache.cached(prefix) and cache.cached(repeated[:2]) and not cache.cached(repeated[:3])


def test_copies_that_are_in_use_wait_until_they_are_free() -> None:
    cache, copies = Cache(num_blocks=7, max_blocks=0), PrivateCopies()
    _, blocks = cache.run(6)
    cache.pool.touch(blocks[:3])
    copies.add(blocks)
    copies.evict_first(cache.store, num_needed=1)
    assert len(copies) == 3
    cache.pool.free_blocks(blocks[:3])
    copies.evict_first(cache.store, num_needed=1)
    assert len(copies) == 0 and cache.pool.get_num_free_blocks() == 6


@pytest.mark.parametrize(
    "said",
    [None, 3, [], {"a": 3}, {"a": {"priority": "x", "pinned": 1}}, {"a": {"priority": 7}}, {"a": {"change": -1}}],
)
def test_an_update_that_cannot_be_read_is_harmless(said: object) -> None:
    assert set(read_claims(said).values()) <= {Claim()}


# In an engine

SYSTEM, *LIBRARY = documents(80, 40, 60, 70, 90, 100, 64, 50, 80, 75)


def labelled(number: int, **how: Any) -> dict[str, Any]:
    return {"labels": (f"doc {number} [stored {number}]",), **how}


def actions(answer: Any) -> list[str]:
    return [row["action"] for row in answer.report["documents"]]


def pooled(engine: Any) -> dict[str, int]:
    return dict(engine.call(look_at_pool))


def look_at_pool(engine: Any) -> dict[str, int]:
    """Inside: what the pool has; its invariants hold."""
    pool = engine.scheduler.connector._composer.order.pool
    pool.check_invariants()
    return {
        "documents": len(pool),
        "blocks": pool.num_blocks,
        "pinned": pool.num_pinned,
        "evicted": pool.num_evicted,
        "max": pool.max_blocks,
    }


def set_claims(engine: Any, update: dict[str, Any]) -> None:
    """Inside: as the front does when a document is pinned."""
    ask = Ask((0,), max_tokens=1).to_json()
    from support.vllm.inside import answer

    answer(engine, [{**ask, "kv_transfer_params": {"kvmosaic": {"update": update}}}])


def sized(size: object, **more: Any) -> dict[str, Any]:
    from support.vllm.forking import CONNECTOR

    return {
        "kv_transfer_config": {**CONNECTOR, "kv_connector_extra_config": {"document_cache_size": size, **more}},
        "num_gpu_blocks_override": 64,
    }


def flood(engine: Any, seed: int, count: int = 12) -> None:
    """Ordinary prompts, one after the other, which together need more blocks than there are."""
    for tokens in documents(seed, *[300] * count):
        engine.ask(Ask(tuple(tokens), max_tokens=1))


def test_documents_outlive_a_flood_of_ordinary_prompts(vllm_engine: Any) -> None:
    ask = compose(SYSTEM, LIBRARY[:3], [5, 6, 7], repair=0)
    for size, expected in ((0.5, {"reused", "moved"}), ("0", {"computed"})):
        engine = vllm_engine("llama", **sized(size))
        first = engine.ask(ask)
        flood(engine, 81)
        again = engine.ask(compose(SYSTEM, LIBRARY[2::-1], [5, 6, 7], repair=0))
        assert set(actions(again)) <= expected, again.report
        assert difference(first, engine.ask(ask)) < CLOSE
        state = engine.call("settle")
        assert not state["referenced"] and state["free"] == state["num_blocks"] - 1
    assert pooled(vllm_engine("llama", **sized("0")))["documents"] == 0


def test_a_pinned_document_stays_when_more_are_used_than_fit(vllm_engine: Any) -> None:
    engine = vllm_engine("llama", **sized("512 tokens", document_eviction="lru"))
    assert pooled(engine)["max"] == 16
    engine.ask(compose(SYSTEM, LIBRARY[:1], [5], **labelled(0)))
    engine.call(set_claims, update={"doc 0 [stored 0]": {"pinned": True, "priority": 0.2}})
    assert pooled(engine)["pinned"] == 1
    for number in range(1, 8):
        engine.ask(compose(SYSTEM, LIBRARY[number : number + 1], [5], **labelled(number)))
        flood(engine, 82 + number, 3)
    assert pooled(engine)["evicted"] > 0 and pooled(engine)["blocks"] <= 16
    flood(engine, 95)
    assert actions(engine.ask(compose(SYSTEM, [LIBRARY[7], LIBRARY[0]], [9])))[1] == "moved"
    assert actions(engine.ask(compose(SYSTEM, LIBRARY[1:2], [9]))) == ["computed"]
    engine.call(set_claims, update={"doc 0 [stored 0]": None})
    assert pooled(engine)["pinned"] == 0


def test_a_pin_that_comes_with_the_request_holds_as_well(vllm_engine: Any) -> None:
    engine = vllm_engine("llama", **sized(0.25))
    engine.call("reset_prefix_cache")
    engine.ask(compose(SYSTEM, LIBRARY[3:4], [5], **labelled(3, pins=(1,), priorities=(0.9,))))
    assert pooled(engine)["pinned"] == 1
    assert engine.call("reset_prefix_cache"), "nothing is in use"
    flood(engine, 96, 1)
    assert pooled(engine)["documents"] == 0


def test_documents_give_way_before_a_request_is_preempted(vllm_engine: Any) -> None:
    """A prompt that needs nearly all blocks, and answers that grow into the room of documents."""
    engine = vllm_engine("llama", **sized(1))
    engine.call("count_preemptions")
    engine.ask(compose(SYSTEM, LIBRARY, [5, 6, 7], repair=0))
    assert pooled(engine)["documents"] == len(LIBRARY)
    before = pooled(engine)["evicted"]
    prompts = documents(97, *[400] * 4)
    asks = [Ask(tuple(tokens), max_tokens=100) for tokens in prompts]  # 4 x 16 blocks of 63, if all ran to the end
    asks[-1] = replace(asks[-1], max_tokens=60)
    answers = engine.play(asks, [0] * 4, [None] * 4)
    assert all(answer is not None for answer in answers)
    assert engine.call("preemptions") == 0
    assert pooled(engine)["evicted"] > before
    plain = vllm_engine("llama", plugin=False)
    for ask, answer in zip(asks, answers, strict=True):
        assert difference(answer, plain.ask(ask)) < CLOSE


def test_in_place_and_copied_crowds_keep_the_pool_whole(vllm_engine: Any) -> None:
    alone = vllm_engine("llama")
    for reads in ("copy", "in-place"):
        engine = vllm_engine("llama", environment={"KVMOSAIC_DOCUMENT_READS": reads}, **sized(0.4))
        draw = random.Random(5)
        asks = [compose(SYSTEM, draw.sample(LIBRARY, 3), [number + 1], **labels(draw)) for number in range(16)]
        asks = [ask.plain if number % 5 == 4 else ask for number, ask in enumerate(asks)]
        abort = [draw.randint(1, 9) if number % 4 == 3 else None for number in range(16)]
        answers = engine.play(asks, [draw.randint(0, 9) for _ in asks], abort)
        for ask, answer in zip(asks, answers, strict=True):
            if answer is not None:
                assert difference(answer, alone.ask(ask)) < CLOSE
        assert pooled(engine)["documents"] > 0
        state = engine.call("settle")
        assert not state["referenced"] and state["free"] == state["num_blocks"] - 1


def labels(draw: random.Random) -> dict[str, Any]:
    return {
        "labels": tuple(f"{draw.randint(0, 3)} [stored 1]" for _ in range(3)),
        "pins": tuple(draw.randint(0, 1) for _ in range(3)),
        "priorities": tuple(draw.choice([None, 0.1, 0.9]) for _ in range(3)),
    }


def test_copies_of_a_finished_request_leave_before_an_ordinary_prefix(vllm_engine: Any) -> None:
    engine = vllm_engine("llama", **sized("0"))
    engine.call("reset_prefix_cache")
    prefix = Ask(tuple(documents(98, 320)[0]), max_tokens=1)
    engine.ask(prefix)
    ask = replace(compose(SYSTEM, LIBRARY[3:6], [5, 6, 7], repair=0), max_tokens=1)
    engine.ask(ask)
    again = engine.ask(ask)
    assert again.report["totals"]["cached_tokens"] >= len(ask.token_ids) - 32
    assert engine.call(count_cached, ask=ask.to_json()) > 4, "an exact repeat hits the copies"
    engine.ask(Ask(tuple(documents(99, 32 * 38)[0][:900]), max_tokens=1))
    assert engine.call(count_cached, ask=ask.to_json()) == 4, "what an ordinary prompt has as well"
    assert engine.ask(prefix).num_cached_tokens == 288, "which is older, and stayed"


def count_cached(engine: Any, ask: dict[str, Any]) -> int:
    """Inside: how many leading blocks of a composed prompt are in vLLM's prefix cache under its own hashes."""
    from support.vllm.inside import prompt_and_params

    side = engine.scheduler.connector._composer
    found: list[int] = []
    rehash = side._rehash

    def watched(composed: Any, hasher: Any) -> None:
        rehash(composed, hasher)
        found.append(side.store.num_leading(composed.request.block_hashes))

    side._rehash = watched
    engine.engine.add_request("counted", *prompt_and_params(ask))
    engine.engine.abort_request(["counted"])
    side._rehash = rehash
    return found[0]


def test_a_size_that_is_none_is_refused(vllm_model: Any) -> None:
    from support.vllm.forking import ForkedEngine

    with pytest.raises(AssertionError, match=r"document_cache_size is '1\.5'"):
        ForkedEngine(vllm_model("llama"), **sized("1.5"))
