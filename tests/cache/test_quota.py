"""Quotas: whose chunks leave, what is refused, and what waits."""

import time

import pytest
from cache.world import Clock, compute_all, layout_of, make_planner, state_of, warmed

from kvmosaic.cache import TenantUsage
from kvmosaic.errors import ChunkCacheFull, InvalidConfig, OutOfBlocks, QuotaExceeded, QuotaInUse

SYSTEM, QUESTION = [1] * 6, [4, 5, 6]


def prompt(*numbers: int, blocks: int = 1):
    """Documents of so many blocks of four tokens, known by their numbers."""
    documents = [[number] * 4 * blocks for number in numbers]
    return layout_of(SYSTEM, documents, QUESTION, names=[str(number) for number in numbers])


def cached(planner, tenant: str) -> set[str]:
    return {next(iter(chunk.names)) for chunk in planner.chunks() if chunk.tenant == tenant}


def world(quota: int | None = 4, **options):
    clock = Clock()
    planner = make_planner(clock=clock, **options)
    planner.set_quota("t", quota)

    def warm(*numbers: int, tenant: str = "t", blocks: int = 1):
        clock.wait(1)
        warmed(planner, prompt(*numbers, blocks=blocks), tenant=tenant)
        planner.check_invariants()

    return planner, warm


def test_a_tenant_makes_room_in_its_quota_at_its_own_cost():
    planner, warm = world()
    for number in (10, 11, 12):
        warm(number, tenant="other")
    for number in (20, 21, 22, 23, 24, 25):
        warm(number)
    assert cached(planner, "other") == {"10", "11", "12"}, "older, and still there"
    assert cached(planner, "t") == {"22", "23", "24", "25"}
    assert planner.tenant_usage("t") == TenantUsage(4, 4, 4, 4, 4, 0)
    assert planner.tenant_usage("other") == TenantUsage(3, 3, 3, None, 3, 0)
    assert planner.tenant_usage("nobody") == TenantUsage(0, 0, 0, None, 0, 0)


def test_within_its_quota_a_tenant_takes_the_place_of_whatever_was_idle_for_longest():
    planner, warm = world(chunk_blocks=5)
    for number in (10, 11, 12):
        warm(number, tenant="other")
    for number in (20, 21, 22, 23):
        warm(number)
    assert cached(planner, "other") == {"12"} and len(cached(planner, "t")) == 4
    warm(13, tenant="other")
    warm(14, tenant="other")
    assert cached(planner, "other") == {"13", "14"}, "its own was idle for longest, then the tenant's oldest"
    assert cached(planner, "t") == {"21", "22", "23"}


def test_a_prompt_evicts_no_chunk_of_its_own_to_stay_within_the_quota():
    planner, warm = world()
    warm(20, 21, 22)
    warm(20, 23, 24)
    assert cached(planner, "t") == {"20", "22", "23", "24"}


def test_quotas_are_in_bytes_and_count_whole_blocks():
    planner = make_planner(bytes_per_block=100)
    planner.set_quota("t", 299)
    warmed(planner, prompt(20, 21), tenant="t")
    assert planner.tenant_usage("t") == TenantUsage(2, 2, 200, 299, 2, 0)
    warmed(planner, prompt(22), tenant="t")
    assert planner.tenant_usage("t").num_bytes == 200
    for wrong in (-1, 2**50 + 1):
        with pytest.raises(InvalidConfig, match="between 0 and"):
            planner.set_quota("t", wrong)


@pytest.mark.parametrize(("numbers", "blocks"), [((30,), 5), ((30, 31, 32, 33, 34), 1)])
def test_more_than_the_quota_is_refused_and_nothing_changes(numbers, blocks):
    planner, warm = world()
    warm(20, 21)
    before = state_of(planner)
    with pytest.raises(QuotaExceeded, match="need 5 blocks of 4 tokens; the quota of this tenant is 4") as error:
        planner.attach(planner.plan(prompt(*numbers, blocks=blocks), tenant="t"))
    assert isinstance(error.value, ChunkCacheFull)
    assert state_of(planner) == before
    planner.attach(planner.plan(prompt(*numbers, blocks=blocks), tenant="other"))


def test_pinned_chunks_fill_the_quota_until_they_are_unpinned():
    planner, warm = world()
    warm(20, 21, 22)
    for name in ("20", "21", "22"):
        planner.pin(name, tenant="t")
    warm(23)
    warm(20, 21, 22, 24)
    with pytest.raises(QuotaExceeded, match="of which 3 are pinned for other documents; unpin documents"):
        planner.attach(planner.plan(prompt(25, 26), tenant="t"))
    planner.unpin("20", tenant="t")
    warm(25, 26)
    assert cached(planner, "t") == {"21", "22", "25", "26"}


def test_what_running_requests_hold_of_the_quota_is_waited_for():
    planner, warm = world()
    warm(20, 21)
    reader = planner.attach(planner.plan(prompt(20, 21, 22), tenant="t"))
    compute_all(planner, reader)
    before = state_of(planner)
    with pytest.raises(QuotaInUse, match="of the 4 that this tenant may have, 3 are taken and 0 of these") as error:
        planner.attach(planner.plan(prompt(23, 24), tenant="t"))
    assert isinstance(error.value, OutOfBlocks)
    assert state_of(planner) == before
    planner.delete("20", tenant="t", when_idle=True)
    with pytest.raises(QuotaInUse):
        planner.attach(planner.plan(prompt(23, 24), tenant="t"))
    planner.release(reader)
    warm(23, 24)
    assert cached(planner, "t") == {"21", "22", "23", "24"}


def test_an_idle_chunk_that_the_prompt_itself_needs_makes_no_room_for_it():
    planner, warm = world(quota=3)
    warm(20, 21, 22)
    planner.attach(planner.plan(prompt(21, 22), tenant="t"))
    before = state_of(planner)
    with pytest.raises(QuotaInUse, match="3 are taken and 0 of these may be evicted"):
        planner.attach(planner.plan(prompt(20, 23), tenant="t"))
    assert state_of(planner) == before


def test_the_quota_is_never_exceeded_not_even_while_a_prompt_runs():
    planner, warm = world(quota=3)
    warm(20, 21, 22)
    reader = planner.attach(planner.plan(prompt(22, 23, 24), tenant="t"))
    assert planner.tenant_usage("t").num_blocks == 3 and cached(planner, "t") == {"22", "23", "24"}
    planner.release(reader)


def test_a_smaller_quota_takes_effect_at_once_on_what_is_idle_and_later_on_the_rest():
    planner, warm = world(quota=None)
    warm(20, 21, 22, 23)
    planner.pin("23", tenant="t")
    reader = planner.attach(planner.plan(prompt(20), tenant="t"))
    planner.set_quota("t", 1)
    assert cached(planner, "t") == {"20", "23"}
    planner.check_invariants()
    planner.release(reader)
    assert cached(planner, "t") == {"23"}, "what becomes idle above the quota leaves at once"
    planner.set_quota("t", 0)
    assert cached(planner, "t") == {"23"}
    planner.unpin("23", tenant="t")
    assert cached(planner, "t") == set()
    with pytest.raises(QuotaExceeded):
        planner.attach(planner.plan(prompt(20), tenant="t"))
    planner.set_quota("t", None)
    warm(20)
    planner.check_invariants()


def test_a_reader_of_cached_chunks_is_served_even_above_the_quota():
    planner, warm = world(quota=None)
    warm(20, 21)
    planner.pin("20", tenant="t")
    planner.set_quota("t", 0)
    assert planner.attach(planner.plan(prompt(20), tenant="t")).spans[1].action == "reuse"


@pytest.mark.alone
@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_eviction_for_a_quota_costs_the_same_with_many_chunks_of_others(eviction):
    def seconds(num_others: int) -> float:
        planner, _ = world(quota=2, chunk_blocks=num_others + 8, eviction=eviction)
        for number in range(num_others):
            chunk = planner._chunks.create(
                bytes([1]) + number.to_bytes(31), b"", b"\0" * 4, 0, "", f"tenant {number % 7}"
            )
            chunk.num_computed = 1
            planner._chunks.complete(chunk, 0)
        began = time.perf_counter()
        for number in range(300):
            warmed(planner, prompt(number), tenant="t")
        assert planner.tenant_usage("t").num_blocks == 2 and planner.statistics().evictions == 298
        assert len(planner.chunks()) == num_others + 2
        return time.perf_counter() - began

    few = min(seconds(200) for _ in range(3))
    assert min(seconds(20_000) for _ in range(2)) < 5 * few
