"""Quotas: whose chunks leave, what is refused, and what waits."""

import time

import pytest
from cache.world import Clock, compute_all, layout_of, make_kv_cache, state_of, warmed

from kvmosaic.cache import TenantUsage
from kvmosaic.errors import ChunkCacheFull, InvalidConfig, OutOfBlocks, QuotaExceeded, QuotaInUse

SYSTEM, QUESTION = [1] * 6, [4, 5, 6]


def prompt(*numbers: int, blocks: int = 1):
    """Documents of so many blocks of four tokens, known by their numbers."""
    documents = [[number] * 4 * blocks for number in numbers]
    return layout_of(SYSTEM, documents, QUESTION, names=[str(number) for number in numbers])


def cached(kv_cache, tenant: str) -> set[str]:
    return {next(iter(chunk.names)) for chunk in kv_cache.chunks() if chunk.tenant == tenant}


def world(quota: int | None = 4, **options):
    clock = Clock()
    kv_cache = make_kv_cache(clock=clock, **options)
    kv_cache.set_quota("t", quota)

    def warm(*numbers: int, tenant: str = "t", blocks: int = 1):
        clock.wait(1)
        warmed(kv_cache, prompt(*numbers, blocks=blocks), tenant=tenant)
        kv_cache.check_invariants()

    return kv_cache, warm


def test_a_tenant_makes_room_in_its_quota_at_its_own_cost():
    kv_cache, warm = world()
    for number in (10, 11, 12):
        warm(number, tenant="other")
    for number in (20, 21, 22, 23, 24, 25):
        warm(number)
    assert cached(kv_cache, "other") == {"10", "11", "12"}, "older, and still there"
    assert cached(kv_cache, "t") == {"22", "23", "24", "25"}
    assert kv_cache.tenant_usage("t") == TenantUsage(4, 4, 4, 4, 4, 0, 2)
    assert kv_cache.tenant_usage("other") == TenantUsage(3, 3, 3, None, 3, 0)
    assert kv_cache.tenant_usage("nobody") == TenantUsage(0, 0, 0, None, 0, 0)


def test_within_its_quota_a_tenant_takes_the_place_of_whatever_was_idle_for_longest():
    kv_cache, warm = world(chunk_blocks=5)
    for number in (10, 11, 12):
        warm(number, tenant="other")
    for number in (20, 21, 22, 23):
        warm(number)
    assert cached(kv_cache, "other") == {"12"} and len(cached(kv_cache, "t")) == 4
    warm(13, tenant="other")
    warm(14, tenant="other")
    assert cached(kv_cache, "other") == {"13", "14"}, "its own was idle for longest, then the tenant's oldest"
    assert cached(kv_cache, "t") == {"21", "22", "23"}


def test_a_prompt_evicts_no_chunk_of_its_own_to_stay_within_the_quota():
    kv_cache, warm = world()
    warm(20, 21, 22)
    warm(20, 23, 24)
    assert cached(kv_cache, "t") == {"20", "22", "23", "24"}


def test_quotas_are_in_bytes_and_count_whole_blocks():
    kv_cache = make_kv_cache(bytes_per_block=100)
    kv_cache.set_quota("t", 299)
    warmed(kv_cache, prompt(20, 21), tenant="t")
    assert kv_cache.tenant_usage("t") == TenantUsage(2, 2, 200, 299, 2, 0)
    warmed(kv_cache, prompt(22), tenant="t")
    assert kv_cache.tenant_usage("t").num_bytes == 200
    for wrong in (-1, 2**50 + 1):
        with pytest.raises(InvalidConfig, match="between 0 and"):
            kv_cache.set_quota("t", wrong)


@pytest.mark.parametrize(("numbers", "blocks"), [((30,), 5), ((30, 31, 32, 33, 34), 1)])
def test_more_than_the_quota_is_refused_and_nothing_changes(numbers, blocks):
    kv_cache, warm = world()
    warm(20, 21)
    before = state_of(kv_cache)
    with pytest.raises(QuotaExceeded, match="need 5 blocks of 4 tokens; the quota of this tenant is 4") as error:
        kv_cache.allocate(kv_cache.plan(prompt(*numbers, blocks=blocks), tenant="t"))
    assert isinstance(error.value, ChunkCacheFull)
    assert state_of(kv_cache) == before
    kv_cache.allocate(kv_cache.plan(prompt(*numbers, blocks=blocks), tenant="other"))


def test_pinned_chunks_fill_the_quota_until_they_are_unpinned():
    kv_cache, warm = world()
    warm(20, 21, 22)
    for name in ("20", "21", "22"):
        kv_cache.pin(name, tenant="t")
    warm(23)
    warm(20, 21, 22, 24)
    with pytest.raises(QuotaExceeded, match="of which 3 are pinned for other documents; unpin documents"):
        kv_cache.allocate(kv_cache.plan(prompt(25, 26), tenant="t"))
    kv_cache.unpin("20", tenant="t")
    warm(25, 26)
    assert cached(kv_cache, "t") == {"21", "22", "25", "26"}


def test_what_running_requests_hold_of_the_quota_is_waited_for():
    kv_cache, warm = world()
    warm(20, 21)
    reader = kv_cache.allocate(kv_cache.plan(prompt(20, 21, 22), tenant="t"))
    compute_all(kv_cache, reader)
    before = state_of(kv_cache)
    with pytest.raises(QuotaInUse, match="of the 4 that this tenant may have, 3 are taken and 0 of these") as error:
        kv_cache.allocate(kv_cache.plan(prompt(23, 24), tenant="t"))
    assert isinstance(error.value, OutOfBlocks)
    assert state_of(kv_cache) == before
    kv_cache.delete("20", tenant="t", when_idle=True)
    with pytest.raises(QuotaInUse):
        kv_cache.allocate(kv_cache.plan(prompt(23, 24), tenant="t"))
    kv_cache.release(reader)
    warm(23, 24)
    assert cached(kv_cache, "t") == {"21", "22", "23", "24"}


def test_an_idle_chunk_that_the_prompt_itself_needs_makes_no_room_for_it():
    kv_cache, warm = world(quota=3)
    warm(20, 21, 22)
    kv_cache.allocate(kv_cache.plan(prompt(21, 22), tenant="t"))
    before = state_of(kv_cache)
    with pytest.raises(QuotaInUse, match="3 are taken and 0 of these may be evicted"):
        kv_cache.allocate(kv_cache.plan(prompt(20, 23), tenant="t"))
    assert state_of(kv_cache) == before


def test_the_quota_is_never_exceeded_not_even_while_a_prompt_runs():
    kv_cache, warm = world(quota=3)
    warm(20, 21, 22)
    reader = kv_cache.allocate(kv_cache.plan(prompt(22, 23, 24), tenant="t"))
    assert kv_cache.tenant_usage("t").num_blocks == 3 and cached(kv_cache, "t") == {"22", "23", "24"}
    kv_cache.release(reader)


def test_a_smaller_quota_takes_effect_at_once_on_what_is_idle_and_later_on_the_rest():
    kv_cache, warm = world(quota=None)
    warm(20, 21, 22, 23)
    kv_cache.pin("23", tenant="t")
    reader = kv_cache.allocate(kv_cache.plan(prompt(20), tenant="t"))
    kv_cache.set_quota("t", 1)
    assert cached(kv_cache, "t") == {"20", "23"}
    kv_cache.check_invariants()
    kv_cache.release(reader)
    assert cached(kv_cache, "t") == {"23"}, "what becomes idle above the quota leaves at once"
    kv_cache.set_quota("t", 0)
    assert cached(kv_cache, "t") == {"23"}
    kv_cache.unpin("23", tenant="t")
    assert cached(kv_cache, "t") == set()
    with pytest.raises(QuotaExceeded):
        kv_cache.allocate(kv_cache.plan(prompt(20), tenant="t"))
    kv_cache.set_quota("t", None)
    warm(20)
    kv_cache.check_invariants()


def test_a_reader_of_cached_chunks_is_served_even_above_the_quota():
    kv_cache, warm = world(quota=None)
    warm(20, 21)
    kv_cache.pin("20", tenant="t")
    kv_cache.set_quota("t", 0)
    assert kv_cache.allocate(kv_cache.plan(prompt(20), tenant="t")).spans[1].action == "reuse"


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_eviction_for_a_quota_costs_the_same_with_many_chunks_of_others(eviction):
    def seconds(num_others: int) -> float:
        kv_cache, _ = world(quota=2, chunk_blocks=num_others + 8, eviction=eviction)
        for number in range(num_others):
            chunk = kv_cache._chunks.create(
                bytes([1]) + number.to_bytes(31), b"", b"\0" * 4, 0, "", f"tenant {number % 7}"
            )
            chunk.num_computed = 1
            kv_cache._chunks.complete(chunk, 0)
        began = time.thread_time()
        for number in range(300):
            warmed(kv_cache, prompt(number), tenant="t")
        assert kv_cache.tenant_usage("t").num_blocks == 2 and kv_cache.statistics().evictions == 298
        assert len(kv_cache.chunks()) == num_others + 2
        return time.thread_time() - began

    few = min(seconds(200) for _ in range(3))
    assert min(seconds(20_000) for _ in range(2)) < 5 * few
