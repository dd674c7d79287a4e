"""Tenants: what they do not share, and how names, pins and deletion stay within one of them."""

import pytest
from cache.world import Clock, compute_all, layout_of, make_kv_cache, plain, state_of, warmed

from kvmosaic.cache.chunk_index import SPARED_SECONDS
from kvmosaic.cache.tenants import MAX_PINNED_NAMES
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import ChunkInUse, InvalidPrompt, QuotaExceeded, UnknownChunk
from kvmosaic.prompt import Prompt, PromptEncoder, Segment, SegmentKind

SYSTEM, DOC_A, DOC_B, QUESTION = [1] * 6, [2] * 5, [3] * 9, [4, 5, 6]


def one(*, names=("a",), system=SYSTEM, document=DOC_A):
    return layout_of(system, [document], QUESTION, names=list(names))


def test_tenants_share_neither_chunks_nor_prefix_blocks_whatever_their_salts():
    kv_cache = make_kv_cache()
    borders = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    for count, (tenant, salt) in enumerate(borders, start=1):
        assert kv_cache.plan(one(), salt, tenant).reused_tokens == 0
        assert kv_cache.plan(plain([1] * 9), salt, tenant).reused_tokens == 0
        warmed(kv_cache, one(), salt, tenant)
        warmed(kv_cache, plain([1] * 9), salt, tenant)
        assert kv_cache.plan(one(), salt, tenant).reused_tokens == 11
        assert kv_cache.plan(plain([1] * 9), salt, tenant).reused_tokens == 8
        assert len(kv_cache.chunks()) == count
    kv_cache.check_invariants()


def test_a_name_or_key_of_another_tenant_is_unknown_and_the_message_does_not_count_its_chunks():
    kv_cache = make_kv_cache()
    warmed(kv_cache, one(), tenant="first")
    (chunk,) = kv_cache.find_chunks("a", tenant="first")
    assert kv_cache.find_chunks(chunk.key, tenant="first") == [chunk] and chunk.tenant == "first"
    for call in (kv_cache.find_chunks, kv_cache.pin, kv_cache.unpin, kv_cache.delete):
        for name_or_key in ("a", chunk.key):
            before = state_of(kv_cache)
            with pytest.raises(UnknownChunk, match="among 0;"):
                call(name_or_key, None, "second")
            assert state_of(kv_cache) == before


def test_a_salt_narrows_a_name_down_and_none_means_every_salt_of_the_tenant():
    kv_cache = make_kv_cache()
    for tenant, salt in [("t", ""), ("t", "x"), ("other", "x")]:
        warmed(kv_cache, one(), salt, tenant)
    assert len(kv_cache.find_chunks("a", None, "t")) == 2
    assert [chunk.salt for chunk in kv_cache.find_chunks("a", "x", "t")] == ["x"]
    assert kv_cache.pin("a", None, "t") == 2
    assert kv_cache.unpin("a", "x", "t") == 1
    assert kv_cache.set_priority("a", 0.9, None, "t") == 2
    assert kv_cache.delete("a", None, "t") == 2
    assert [chunk.tenant for chunk in kv_cache.chunks()] == ["other"]
    kv_cache.check_invariants()


def test_a_prompt_keeps_its_tenant_when_it_is_tokenized():
    prompt = Prompt((Segment(SegmentKind.PLAIN, (1, 2)),), tenant="t", salt="s")
    encoded = PromptEncoder(None, ChunkCacheConfig(), vocab_size=9).encode(prompt)
    assert (encoded.tenant, encoded.salt) == ("t", "s")
    with pytest.raises(InvalidPrompt, match="tenant must be a text of at most 256 characters"):
        Prompt((Segment(SegmentKind.PLAIN, (1, 2)),), tenant="t" * 257)


def test_a_chunk_deleted_while_it_is_read_is_found_by_nobody_and_goes_with_its_last_reader():
    kv_cache = make_kv_cache()
    warmed(kv_cache, one(), tenant="t")
    first, second = (kv_cache.allocate(kv_cache.plan(one(), tenant="t")) for _ in range(2))
    with pytest.raises(ChunkInUse):
        kv_cache.delete("a", tenant="t")
    kv_cache.pin("a", tenant="t")
    assert kv_cache.delete("a", tenant="t", when_idle=True) == 1
    assert kv_cache.chunks() == [] and kv_cache.statistics().pinned_chunks == 0
    assert kv_cache.plan(one(), tenant="t").spans[1].action == "compute"
    with pytest.raises(UnknownChunk):
        kv_cache.find_chunks("a", tenant="t")
    assert not first.is_stale and first.spans[1].is_ready
    usage = kv_cache.tenant_usage("t")
    assert (usage.num_chunks, usage.num_blocks) == (0, 2), "its blocks count until they are free"
    for allocation in (first, second):
        assert kv_cache.chunk_pool.num_used == 2
        kv_cache.check_invariants()
        kv_cache.release(allocation)
    assert kv_cache.chunk_pool.num_used == 0 and kv_cache.tenant_usage("t").num_blocks == 0
    kv_cache.check_invariants()


def test_an_idle_chunk_is_deleted_at_once_whatever_the_others_with_its_name_do():
    kv_cache = make_kv_cache()
    warmed(kv_cache, one())
    warmed(kv_cache, one(system=[9]))
    reader = kv_cache.allocate(kv_cache.plan(one()))
    assert kv_cache.delete("a", when_idle=True) == 2
    assert kv_cache.chunk_pool.num_used == 2
    kv_cache.release(reader)
    assert kv_cache.chunk_pool.num_used == 0
    kv_cache.check_invariants()


def test_a_chunk_deleted_while_it_is_computed_serves_those_who_wait_for_it_and_nobody_else():
    kv_cache = make_kv_cache()
    owner, reader = (kv_cache.allocate(kv_cache.plan(one())) for _ in range(2))
    kv_cache.advance(owner, 1, 2)
    kv_cache.delete("a", when_idle=True)
    late = kv_cache.allocate(kv_cache.plan(one()))
    assert late.spans[1].is_owner and late.spans[1].chunk is not owner.spans[1].chunk
    kv_cache.check_invariants()
    compute_all(kv_cache, owner)
    kv_cache.check_invariants()
    assert reader.spans[1].is_ready and not reader.is_stale and not late.spans[1].is_ready
    fork = kv_cache.fork(owner)
    for allocation in (owner, reader, fork):
        kv_cache.release(allocation)
        kv_cache.check_invariants()
    assert kv_cache.find_chunks("a") == [late.spans[1].chunk]
    assert kv_cache.chunk_pool.num_used == 2
    kv_cache.release(late)
    assert kv_cache.chunk_pool.num_used == 0


@pytest.mark.parametrize("how", ["release", "forget"])
def test_a_deleted_chunk_whose_owner_does_not_finish_is_planned_again_by_those_who_wait(how):
    kv_cache = make_kv_cache()
    owner, reader = (kv_cache.allocate(kv_cache.plan(one())) for _ in range(2))
    kv_cache.begin_step()
    kv_cache.advance(owner, 1, 5 if how == "forget" else 2)
    kv_cache.delete("a", when_idle=True)
    if how == "forget":
        kv_cache.rollback_step(owner)
    kv_cache.release(owner)
    assert reader.is_stale
    kv_cache.check_invariants()
    kv_cache.release(reader)
    assert kv_cache.chunk_pool.num_used == 0
    kv_cache.check_invariants()


def test_chunks_with_a_kept_name_are_pinned_when_they_are_ready():
    kv_cache = make_kv_cache()
    kv_cache.pin_when_ready("a", "t")
    allocation = kv_cache.allocate(kv_cache.plan(one(), tenant="t"))
    assert kv_cache.statistics().pinned_chunks == 0
    compute_all(kv_cache, allocation)
    kv_cache.release(allocation)
    warmed(kv_cache, one(system=[9]), "salt", "t")
    warmed(kv_cache, one(), tenant="other")
    warmed(kv_cache, one(names=["b"], document=DOC_B), tenant="t")
    assert sorted((c.tenant, next(iter(c.names)), c.pinned) for c in kv_cache.chunks()) == [
        ("other", "a", False),
        ("t", "a", True),
        ("t", "a", True),
        ("t", "b", False),
    ]
    kv_cache.pin_when_ready("a", "t", wanted=False)
    kv_cache.unpin("a", None, "t")
    warmed(kv_cache, one(), tenant="t")
    assert kv_cache.statistics().pinned_chunks == 0
    kv_cache.check_invariants()


def test_a_ready_chunk_is_pinned_when_a_prompt_calls_it_by_a_kept_name():
    kv_cache = make_kv_cache()
    warmed(kv_cache, one(names=["first name"]))
    kv_cache.pin_when_ready("a")
    assert not kv_cache.chunks()[0].pinned
    warmed(kv_cache, one())
    assert kv_cache.chunks()[0].pinned


def test_a_kept_name_stands_for_the_parts_of_a_split_document():
    kv_cache = make_kv_cache()
    kv_cache.pin_when_ready("a")
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A, DOC_B, [8] * 3], QUESTION, names=["a (1/2)", "a (2/2)", "a (x)"]))
    assert [chunk.pinned for chunk in kv_cache.chunks()] == [True, True, False]


def test_kept_names_fill_half_of_the_room_so_that_others_can_still_be_cached():
    clock = Clock()
    kv_cache = make_kv_cache(chunk_blocks=8, clock=clock)
    kv_cache.pin_when_ready("a")
    for number in range(5):
        clock.wait(1)
        warmed(kv_cache, one(system=[number]))
    assert [chunk.pinned for chunk in kv_cache.chunks()] == [True, True, False, False]
    kv_cache.set_quota("t", 4)
    kv_cache.pin_when_ready("a", "t")
    for number in range(5):
        clock.wait(1)
        warmed(kv_cache, one(system=[number]), tenant="t")
    assert [chunk.pinned for chunk in kv_cache.find_chunks("a", tenant="t")] == [True, False]
    kv_cache.check_invariants()


def test_documents_of_a_conversation_that_goes_on_outlive_newer_ones_for_a_while():
    for wait, survives in ((SPARED_SECONDS - 5, True), (SPARED_SECONDS + 5, False)):
        clock = Clock()
        kv_cache = make_kv_cache(chunk_blocks=8, clock=clock)
        warmed(kv_cache, one(names=["result"]), goes_on=True)
        clock.wait(wait)
        for number in range(4):
            clock.wait(1)
            warmed(kv_cache, one(names=["new"], system=[number]))
        names = [chunk.names for chunk in kv_cache.chunks()]
        assert (("result",) in names) is survives, names
        kv_cache.check_invariants()


def test_what_waits_is_half_of_a_tenants_room_and_never_refuses_others():
    clock = Clock()
    kv_cache = make_kv_cache(chunk_blocks=8, clock=clock)
    for number in range(6):
        clock.wait(1)
        warmed(kv_cache, one(names=["waits"], system=[number]), goes_on=True)
    assert [bool(chunk.spared_until) for chunk in kv_cache.chunks()] == [True, True, False, False]
    warmed(kv_cache, one(names=["waits"], system=[0]), goes_on=True)  # the next turn of the first one
    kv_cache.check_invariants()
    for number in range(6, 12):
        clock.wait(1)
        warmed(kv_cache, one(names=["other"], system=[number]))
    assert [chunk.names[0] for chunk in kv_cache.chunks()] == ["waits", "waits", "other", "other"]
    kv_cache.delete("waits")
    kv_cache.check_invariants()


def test_only_so_many_names_are_kept_for_one_tenant():
    kv_cache = make_kv_cache()
    for number in range(MAX_PINNED_NAMES):
        kv_cache.pin_when_ready(str(number), "t")
    kv_cache.pin_when_ready("7", "t")
    kv_cache.pin_when_ready("one more", "other")
    with pytest.raises(QuotaExceeded, match="10000 is the limit; unpin one first"):
        kv_cache.pin_when_ready("one more", "t")
    for number in range(MAX_PINNED_NAMES):
        kv_cache.pin_when_ready(str(number), "t", wanted=False)
    kv_cache.pin_when_ready("one more", "t", wanted=False)
    kv_cache.pin_when_ready("one more", "other", wanted=False)
    assert kv_cache._chunks._accounts == {}, "nothing is remembered of tenants that have nothing"
