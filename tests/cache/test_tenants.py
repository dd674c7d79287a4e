"""Tenants: what they do not share, and how names, pins and deletion stay within one of them."""

import pytest
from cache.world import Clock, compute_all, layout_of, make_planner, plain, state_of, warmed

from kvmosaic.cache.kept_names import MAX_KEPT_NAMES
from kvmosaic.errors import ChunkInUse, InvalidPrompt, QuotaExceeded, UnknownChunk
from kvmosaic.prompt import Prompt, PromptEncoder, Segment, SegmentKind

SYSTEM, DOC_A, DOC_B, QUESTION = [1] * 6, [2] * 5, [3] * 9, [4, 5, 6]


def one(*, names=("a",), system=SYSTEM, document=DOC_A):
    return layout_of(system, [document], QUESTION, names=list(names))


def test_tenants_share_neither_chunks_nor_prefix_blocks_whatever_their_salts():
    planner = make_planner()
    borders = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    for count, (tenant, salt) in enumerate(borders, start=1):
        assert planner.plan(one(), salt, tenant).reused_tokens == 0
        assert planner.plan(plain([1] * 9), salt, tenant).reused_tokens == 0
        warmed(planner, one(), salt, tenant)
        warmed(planner, plain([1] * 9), salt, tenant)
        assert planner.plan(one(), salt, tenant).reused_tokens == 11
        assert planner.plan(plain([1] * 9), salt, tenant).reused_tokens == 8
        assert len(planner.chunks()) == count
    planner.check_invariants()


def test_a_name_or_key_of_another_tenant_is_unknown_and_the_message_does_not_count_its_chunks():
    planner = make_planner()
    warmed(planner, one(), tenant="first")
    (chunk,) = planner.find_chunks("a", tenant="first")
    assert planner.find_chunks(chunk.key, tenant="first") == [chunk] and chunk.tenant == "first"
    for call in (planner.find_chunks, planner.pin, planner.unpin, planner.delete):
        for name_or_key in ("a", chunk.key):
            before = state_of(planner)
            with pytest.raises(UnknownChunk, match="among 0;"):
                call(name_or_key, None, "second")
            assert state_of(planner) == before


def test_a_salt_narrows_a_name_down_and_none_means_every_salt_of_the_tenant():
    planner = make_planner()
    for tenant, salt in [("t", ""), ("t", "x"), ("other", "x")]:
        warmed(planner, one(), salt, tenant)
    assert len(planner.find_chunks("a", None, "t")) == 2
    assert [chunk.salt for chunk in planner.find_chunks("a", "x", "t")] == ["x"]
    assert planner.pin("a", None, "t") == 2
    assert planner.unpin("a", "x", "t") == 1
    assert planner.set_priority("a", 0.9, None, "t") == 2
    assert planner.delete("a", None, "t") == 2
    assert [chunk.tenant for chunk in planner.chunks()] == ["other"]
    planner.check_invariants()


def test_a_prompt_keeps_its_tenant_when_it_is_tokenized():
    prompt = Prompt((Segment(SegmentKind.PLAIN, (1, 2)),), tenant="t", salt="s")
    encoded = PromptEncoder(None, vocab_size=9).encode(prompt)
    assert (encoded.tenant, encoded.salt) == ("t", "s")
    with pytest.raises(InvalidPrompt, match="tenant must be a text of at most 256 characters"):
        Prompt((Segment(SegmentKind.PLAIN, (1, 2)),), tenant="t" * 257)


def test_a_chunk_deleted_while_it_is_read_is_found_by_nobody_and_goes_with_its_last_reader():
    planner = make_planner()
    warmed(planner, one(), tenant="t")
    first, second = (planner.attach(planner.plan(one(), tenant="t")) for _ in range(2))
    with pytest.raises(ChunkInUse):
        planner.delete("a", tenant="t")
    planner.pin("a", tenant="t")
    assert planner.delete("a", tenant="t", when_idle=True) == 1
    assert planner.chunks() == [] and planner.statistics().pinned_chunks == 0
    assert planner.plan(one(), tenant="t").spans[1].action == "compute"
    with pytest.raises(UnknownChunk):
        planner.find_chunks("a", tenant="t")
    assert not first.is_stale and first.spans[1].is_ready
    usage = planner.tenant_usage("t")
    assert (usage.num_chunks, usage.num_blocks) == (0, 2), "its blocks count until they are free"
    for attachment in (first, second):
        assert planner.chunk_pool.num_used == 2
        planner.check_invariants()
        planner.release(attachment)
    assert planner.chunk_pool.num_used == 0 and planner.tenant_usage("t").num_blocks == 0
    planner.check_invariants()


def test_an_idle_chunk_is_deleted_at_once_whatever_the_others_with_its_name_do():
    planner = make_planner()
    warmed(planner, one())
    warmed(planner, one(system=[9]))
    reader = planner.attach(planner.plan(one()))
    assert planner.delete("a", when_idle=True) == 2
    assert planner.chunk_pool.num_used == 2
    planner.release(reader)
    assert planner.chunk_pool.num_used == 0
    planner.check_invariants()


def test_a_chunk_deleted_while_it_is_computed_serves_those_who_wait_for_it_and_nobody_else():
    planner = make_planner()
    owner, reader = (planner.attach(planner.plan(one())) for _ in range(2))
    planner.advance(owner, 1, 2)
    planner.delete("a", when_idle=True)
    late = planner.attach(planner.plan(one()))
    assert late.spans[1].is_owner and late.spans[1].chunk is not owner.spans[1].chunk
    planner.check_invariants()
    compute_all(planner, owner)
    planner.check_invariants()
    assert reader.spans[1].is_ready and not reader.is_stale and not late.spans[1].is_ready
    fork = planner.fork(owner)
    for attachment in (owner, reader, fork):
        planner.release(attachment)
        planner.check_invariants()
    assert planner.find_chunks("a") == [late.spans[1].chunk]
    assert planner.chunk_pool.num_used == 2
    planner.release(late)
    assert planner.chunk_pool.num_used == 0


@pytest.mark.parametrize("how", ["release", "forget"])
def test_a_deleted_chunk_whose_owner_does_not_finish_is_planned_again_by_those_who_wait(how):
    planner = make_planner()
    owner, reader = (planner.attach(planner.plan(one())) for _ in range(2))
    planner.begin_step()
    planner.advance(owner, 1, 5 if how == "forget" else 2)
    planner.delete("a", when_idle=True)
    if how == "forget":
        planner.forget(owner)
    planner.release(owner)
    assert reader.is_stale
    planner.check_invariants()
    planner.release(reader)
    assert planner.chunk_pool.num_used == 0
    planner.check_invariants()


def test_chunks_with_a_kept_name_are_pinned_when_they_are_ready():
    planner = make_planner()
    planner.keep("a", "t")
    attachment = planner.attach(planner.plan(one(), tenant="t"))
    assert planner.statistics().pinned_chunks == 0
    compute_all(planner, attachment)
    planner.release(attachment)
    warmed(planner, one(system=[9]), "salt", "t")
    warmed(planner, one(), tenant="other")
    warmed(planner, one(names=["b"], document=DOC_B), tenant="t")
    assert sorted((c.tenant, next(iter(c.names)), c.pinned) for c in planner.chunks()) == [
        ("other", "a", False),
        ("t", "a", True),
        ("t", "a", True),
        ("t", "b", False),
    ]
    planner.keep("a", "t", wanted=False)
    planner.unpin("a", None, "t")
    warmed(planner, one(), tenant="t")
    assert planner.statistics().pinned_chunks == 0
    planner.check_invariants()


def test_a_ready_chunk_is_pinned_when_a_prompt_calls_it_by_a_kept_name():
    planner = make_planner()
    warmed(planner, one(names=["first name"]))
    planner.keep("a")
    assert not planner.chunks()[0].pinned
    warmed(planner, one())
    assert planner.chunks()[0].pinned


def test_a_kept_name_stands_for_the_parts_of_a_split_document():
    planner = make_planner()
    planner.keep("a")
    warmed(planner, layout_of(SYSTEM, [DOC_A, DOC_B, [8] * 3], QUESTION, names=["a (1/2)", "a (2/2)", "a (x)"]))
    assert [chunk.pinned for chunk in planner.chunks()] == [True, True, False]


def test_kept_names_fill_half_of_the_room_so_that_others_can_still_be_cached():
    clock = Clock()
    planner = make_planner(chunk_blocks=8, clock=clock)
    planner.keep("a")
    for number in range(5):
        clock.wait(1)
        warmed(planner, one(system=[number]))
    assert [chunk.pinned for chunk in planner.chunks()] == [True, True, False, False]
    planner.set_quota("t", 4)
    planner.keep("a", "t")
    for number in range(5):
        clock.wait(1)
        warmed(planner, one(system=[number]), tenant="t")
    assert [chunk.pinned for chunk in planner.find_chunks("a", tenant="t")] == [True, False]
    planner.check_invariants()


def test_only_so_many_names_are_kept_for_one_tenant():
    planner = make_planner()
    for number in range(MAX_KEPT_NAMES):
        planner.keep(str(number), "t")
    planner.keep("7", "t")
    planner.keep("one more", "other")
    with pytest.raises(QuotaExceeded, match="10000 is the limit; unpin one first"):
        planner.keep("one more", "t")
    for number in range(MAX_KEPT_NAMES):
        planner.keep(str(number), "t", wanted=False)
    planner.keep("one more", "t", wanted=False)
    planner.keep("one more", "other", wanted=False)
    assert planner._chunks._accounts == {}, "nothing is remembered of tenants that have nothing"
