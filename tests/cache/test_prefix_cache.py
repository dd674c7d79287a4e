import pytest
from cache.world import Clock

from kvmosaic.cache import BlockPool, KeyChain, PrefixCache
from kvmosaic.eviction import LRU, Priority

ROOT, OTHER_ROOT = KeyChain("model").root(0), KeyChain("model").root(1)


class Chain:
    """A prefix cache and its pool, with keys that are easy to make collide."""

    def __init__(self, num_blocks=16, *, policy=None, verify=True):
        self.clock = Clock()
        self.pool = BlockPool("request", num_blocks, 4)
        self.cache = PrefixCache(self.pool, policy or LRU(), self.clock, verify=verify)

    def add(self, key, tokens, parent=None, root=ROOT):
        """A block computed by a writer, which ends at once."""
        (block_id,) = self.pool.allocate(1)
        before = parents_of(parent)
        self.cache.hold(before)
        entry, _ = self.cache.register(key, root, parent, tokens, block_id)
        self.pool.release([block_id])
        if entry is not None:
            self.cache.leave([entry])
        self.cache.leave(before)
        return entry


def parents_of(entry):
    return [] if entry is None else [*parents_of(entry.parent), entry]


def test_the_longest_known_beginning_is_found():
    chain = Chain()
    a = chain.add(b"a", b"1")
    b = chain.add(b"b", b"2", a)
    c = chain.add(b"c", b"3", b)
    assert chain.cache.match(ROOT, [b"a", b"b", b"c"], [b"1", b"2", b"3"]) == [a, b, c]
    assert chain.cache.match(ROOT, [b"a", b"b", b"x", b"c"], [b"1", b"2", b"9", b"3"]) == [a, b]
    assert chain.cache.match(ROOT, [b"x"], [b"1"]) == []


def test_keys_are_made_only_as_far_as_they_are_known():
    chain = Chain()
    chain.add(b"a", b"1")

    def keys():
        yield from (b"a", b"b")
        raise AssertionError("a key behind the first unknown one was made")

    assert len(chain.cache.match(ROOT, keys(), [b"1", b"2", b"3"])) == 1


@pytest.mark.parametrize("verify", [True, False])
def test_colliding_keys_are_told_apart_by_tokens_parent_and_root(verify):
    chain = Chain(verify=verify)
    a, other = chain.add(b"a", b"1"), chain.add(b"o", b"1")
    chain.add(b"b", b"2", a)
    lookups = {
        "tokens": (ROOT, [b"a", b"b"], [b"1", b"9"]),
        "parent": (ROOT, [b"o", b"b"], [b"1", b"2"]),
        "root": (OTHER_ROOT, [b"a", b"b"], [b"1", b"2"]),
    }
    lengths = {name: len(chain.cache.match(*lookup)) for name, lookup in lookups.items()}
    assert lengths == ({"tokens": 1, "parent": 1, "root": 0} if verify else dict.fromkeys(lookups, 2))
    if verify:
        assert chain.add(b"b", b"9", a) is None
        assert chain.add(b"b", b"2", other) is None
        assert chain.add(b"a", b"1", root=OTHER_ROOT) is None
        chain.cache.check_invariants()


def test_the_first_writer_wins():
    chain = Chain()
    first, second = chain.pool.allocate(2)
    entry, is_new = chain.cache.register(b"a", ROOT, None, b"1", first)
    again, is_new_again = chain.cache.register(b"a", ROOT, None, b"1", second)
    assert again is entry and (is_new, is_new_again) == (True, False)
    assert entry.block_id == first and entry.users == 2
    assert chain.pool.reference_count(first) == 2 and chain.pool.reference_count(second) == 1


@pytest.mark.parametrize("policy", [LRU(), Priority()])
def test_children_leave_before_their_parents_and_old_ones_before_new_ones(policy):
    chain = Chain(policy=policy)
    a = chain.add(b"a", b"1")
    b = chain.add(b"b", b"2", a)
    chain.clock.wait(1)
    x = chain.add(b"x", b"8")
    chain.clock.wait(1)
    chain.add(b"y", b"9", x)
    left = []
    for _ in range(4):
        before = set(chain.cache._entries)
        assert chain.cache.evict(1) == 1
        left += before - set(chain.cache._entries)
        chain.cache.check_invariants()
    assert left == [b"b", b"a", b"y", b"x"]
    assert b.is_dropped and chain.pool.num_used == 0
    assert chain.cache.evict(1) == 0 and chain.cache.evict(0) == 0


def test_what_somebody_holds_is_not_evicted_and_neither_is_what_is_before_it():
    chain = Chain()
    a = chain.add(b"a", b"1")
    b = chain.add(b"b", b"2", a)
    chain.add(b"c", b"3", b)
    chain.cache.hold([a, b])
    assert chain.cache.num_idle == 1
    assert chain.cache.evict(9) == 1
    assert chain.cache.match(ROOT, [b"a", b"b", b"c"], [b"1", b"2", b"3"]) == [a, b]
    chain.cache.leave([a, b])
    assert chain.cache.evict(9) == 2


def test_a_dropped_entry_takes_everything_after_it_along_and_stays_with_those_who_hold_it():
    chain = Chain()
    a = chain.add(b"a", b"1")
    b = chain.add(b"b", b"2", a)
    c = chain.add(b"c", b"3", b)
    chain.cache.hold([a, b])
    chain.pool.retain([a.block_id, b.block_id])
    chain.cache.drop(b)
    chain.cache.drop(b)
    chain.cache.check_invariants()
    assert (a.is_dropped, b.is_dropped, c.is_dropped) == (False, True, True)
    assert chain.pool.reference_count(b.block_id) == 1, "its reader's"
    assert chain.cache.register(b"d", ROOT, b, b"4", a.block_id) == (None, False)
    chain.cache.leave([a, b])
    chain.pool.release([a.block_id, b.block_id])
    chain.cache.check_invariants()
    assert chain.cache.evict(9) == 1 and chain.pool.num_used == 0


def test_clearing_is_not_counted_as_eviction():
    chain = Chain()
    chain.add(b"b", b"2", chain.add(b"a", b"1"))
    chain.cache.clear()
    assert len(chain.cache) == chain.cache.num_evictions == chain.pool.num_used == 0


def test_eviction_of_many_takes_as_long_as_their_number_not_its_square():
    chain = Chain(20_000)
    for number in range(20_000):
        chain.add(number.to_bytes(4, "big"), b"1")
    assert chain.cache.evict(19_999) == 19_999
    assert len(chain.cache) == 1
