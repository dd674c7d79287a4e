import pytest
from cache.world import Clock, make_kv_cache, plain

from kvmosaic.cache import BlockPool, KeyChain, PrefixCache
from kvmosaic.cache.keys import encode_tokens
from kvmosaic.eviction import LRU, Priority

ROOT, OTHER_ROOT = KeyChain("model").root(0), KeyChain("model").root(1)


def block(number, num_tokens=4, *, of=()):
    """Encoded tokens: all of one number, or those that are given."""
    return encode_tokens(of or [number] * num_tokens)


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
        self.cache.acquire(before)
        entry, _ = self.cache.register(key, root, parent, tokens, block_id)
        self.pool.release([block_id])
        if entry is not None:
            self.cache.release([entry])
        self.cache.release(before)
        return entry


def parents_of(entry):
    return [] if entry is None else [*parents_of(entry.parent), entry]


def test_the_longest_known_beginning_is_found():
    chain = Chain()
    a = chain.add(b"a", block(1))
    b = chain.add(b"b", block(2), a)
    c = chain.add(b"c", block(3), b)
    assert chain.cache.match(ROOT, [b"a", b"b", b"c"], [block(1), block(2), block(3)]) == [a, b, c]
    assert chain.cache.match(ROOT, [b"a", b"b", b"x", b"c"], [block(1), block(2), block(9), block(3)]) == [a, b]
    assert chain.cache.match(ROOT, [b"x"], [block(1)]) == []


def test_keys_are_made_only_as_far_as_they_are_known():
    chain = Chain()
    chain.add(b"a", block(1))

    def keys():
        yield from (b"a", b"b")
        raise AssertionError("a key behind the first unknown one was made")

    assert len(chain.cache.match(ROOT, keys(), [block(1), block(2), block(3)])) == 1


@pytest.mark.parametrize("verify", [True, False])
def test_colliding_keys_are_told_apart_by_tokens_parent_and_root(verify):
    chain = Chain(verify=verify)
    a, other = chain.add(b"a", block(1)), chain.add(b"o", block(7))
    chain.add(b"b", block(2), a)
    lookups = {
        "tokens": (ROOT, [b"a", b"b"], [block(1), block(9)]),
        "parent": (ROOT, [b"o", b"b"], [block(7), block(2)]),
        "root": (OTHER_ROOT, [b"a", b"b"], [block(1), block(2)]),
    }
    lengths = {name: len(chain.cache.match(*lookup)) for name, lookup in lookups.items()}
    assert lengths == ({"tokens": 1, "parent": 1, "root": 0} if verify else dict.fromkeys(lookups, 2))
    if verify:
        assert chain.add(b"b", block(9), a) is None
        assert chain.add(b"b", block(2), other) is None
        assert chain.add(b"a", block(1), root=OTHER_ROOT) is None
        chain.cache.check_invariants()


def test_the_first_writer_wins():
    chain = Chain()
    first, second = chain.pool.allocate(2)
    entry, is_new = chain.cache.register(b"a", ROOT, None, block(1), first)
    again, is_new_again = chain.cache.register(b"a", ROOT, None, block(1), second)
    assert again is entry and (is_new, is_new_again) == (True, False)
    assert entry.block_id == first and entry.ref_count == 2
    assert chain.pool.reference_count(first) == 2 and chain.pool.reference_count(second) == 1


@pytest.mark.parametrize("policy", [LRU(), Priority()])
def test_children_leave_before_their_parents_and_old_ones_before_new_ones(policy):
    chain = Chain(policy=policy)
    a = chain.add(b"a", block(1))
    b = chain.add(b"b", block(2), a)
    chain.clock.wait(1)
    x = chain.add(b"x", block(8))
    chain.clock.wait(1)
    chain.add(b"y", block(9), x)
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
    a = chain.add(b"a", block(1))
    b = chain.add(b"b", block(2), a)
    chain.add(b"c", block(3), b)
    chain.cache.acquire([a, b])
    assert chain.cache.num_idle == 1
    assert chain.cache.evict(9) == 1
    assert chain.cache.match(ROOT, [b"a", b"b", b"c"], [block(1), block(2), block(3)]) == [a, b]
    chain.cache.release([a, b])
    assert chain.cache.evict(9) == 2


def test_a_dropped_entry_takes_everything_after_it_along_and_stays_with_those_who_hold_it():
    chain = Chain()
    a = chain.add(b"a", block(1))
    b = chain.add(b"b", block(2), a)
    c = chain.add(b"c", block(3), b)
    chain.cache.acquire([a, b])
    chain.pool.retain([a.block_id, b.block_id])
    chain.cache.drop(b)
    chain.cache.drop(b)
    chain.cache.check_invariants()
    assert (a.is_dropped, b.is_dropped, c.is_dropped) == (False, True, True)
    assert chain.pool.reference_count(b.block_id) == 1, "its reader's"
    assert chain.cache.register(b"d", ROOT, b, block(4), a.block_id) == (None, False)
    chain.cache.release([a, b])
    chain.pool.release([a.block_id, b.block_id])
    chain.cache.check_invariants()
    assert chain.cache.evict(9) == 1 and chain.pool.num_used == 0


def test_clearing_is_not_counted_as_eviction():
    chain = Chain()
    chain.add(b"b", block(2), chain.add(b"a", block(1)))
    chain.cache.clear()
    assert len(chain.cache) == chain.cache.num_evictions == chain.pool.num_used == 0


def test_eviction_of_many_takes_as_long_as_their_number_not_its_square():
    chain = Chain(20_000)
    for number in range(20_000):
        chain.add(number.to_bytes(4, "big"), number.to_bytes(4, "big"))
    assert chain.cache.evict(19_999) == 19_999
    assert len(chain.cache) == 1
    chain.cache.check_invariants()


def test_the_block_that_begins_most_alike_is_found_to_be_copied():
    chain = Chain()
    a = chain.add(b"a", block(1))
    chain.add(b"b", block(0, of=[1, 2, 3, 4]), a)
    c = chain.add(b"c", block(0, of=[1, 2, 5]), a)
    for asked, entry, alike in (([1, 2, 5, 6], c, 3), ([1, 2, 5], c, 3), ([1, 2], None, 2), ([9], None, 0)):
        found = chain.cache.nearest(ROOT, a, block(0, of=asked))
        assert found[1] == alike and (entry is None or found[0] is entry)
    assert chain.cache.nearest(ROOT, None, block(1, 3)) == (None, 0), "too little at the very beginning"
    assert chain.cache.nearest(OTHER_ROOT, None, block(1)) == (None, 0)
    assert chain.cache.covering(ROOT, a, block(0, of=[1, 2, 5])) is c
    assert chain.cache.covering(ROOT, a, block(0, of=[1, 2, 5, 5])) is None


def test_what_is_not_written_yet_is_not_copied_but_may_be_shared():
    chain = Chain()
    entry = chain.add(b"a", block(0, of=[1, 2, 3, 4]))
    entry.step = chain.cache.unwritten_step = 7
    assert chain.cache.nearest(ROOT, None, block(0, of=[1, 2, 3, 4])) == (None, 0)
    assert chain.cache.covering(ROOT, None, block(0, of=[1, 2])) is entry
    chain.cache.unwritten_step = -1
    assert chain.cache.nearest(ROOT, None, block(0, of=[1, 2, 3, 4])) == (entry, 4)


def test_a_tail_leaves_when_a_block_goes_on_with_it_unless_somebody_uses_it():
    chain = Chain()
    a = chain.add(b"a", block(1))
    used, idle = chain.add(b"t", block(0, of=[1, 2]), a), chain.add(b"u", block(0, of=[3]), a)
    chain.cache.acquire([a, used])
    chain.add(b"b", block(0, of=[1, 2, 3, 4]), a)
    longer = chain.add(b"c", block(0, of=[3, 4]), a)
    assert not used.is_dropped and idle.is_dropped
    assert chain.add(b"d", block(0, of=[3]), a) is longer, "a tail that is known already is not kept twice"
    chain.cache.release([a, used])
    chain.cache.check_invariants()
    assert chain.cache.num_evictions == 0


def test_a_tail_that_is_released_before_its_step_is_written_is_not_found():
    kv_cache = make_kv_cache(block_size=4)
    allocation = kv_cache.allocate(kv_cache.plan(plain(range(6))))
    kv_cache.begin_step()
    kv_cache.advance(allocation, 0, 6)
    kv_cache.release(allocation)
    kv_cache.end_step()
    assert kv_cache.plan(plain([*range(6), 9])).spans[0].num_reused == 4
