"""Prefix entries: cached blocks, and items sorted by their tokens, searched by common prefix."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvmosaic.cache.block_pool import BlockId
from kvmosaic.cache.block_table import SavedState
from kvmosaic.cache.keys import TOKEN_BYTES, Key

_MAX_IN_A_BUCKET = 1_024


class Holder(NamedTuple):
    """What an eviction policy knows of the sequence that released a block."""

    priority: float = 0.5
    """Priority of the sequence, 0 to 1."""
    progress: float = 1.0
    """Fraction of its tokens that was computed."""


_USUAL = Holder()


class PrefixEntry:
    """One cached block: its tokens, after those of all its ancestors."""

    __slots__ = (
        "_children",
        "block_id",
        "hits",
        "is_dropped",
        "key",
        "last_holder",
        "last_used",
        "parent",
        "queue_entry",
        "ref_count",
        "root",
        "state",
        "step",
        "tokens",
    )

    def __init__(
        self, key: Key, root: Key, parent: PrefixEntry | None, tokens: bytes, block_id: BlockId, step: int = 0
    ) -> None:
        self.key = key
        self.root = root
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.ref_count = 0
        """Allocations that hold this entry; they hold all of its ancestors too."""
        self._children: PrefixEntry | SortedByTokens[PrefixEntry] | None = None
        self.hits = 0
        """Spans that were allocated to it, or copied its first tokens."""
        self.step = step
        """The step that computes its last token."""
        self.last_used = 0.0
        self.last_holder = _USUAL
        """The sequence that released it last."""
        self.queue_entry: tuple[float, int, PrefixEntry] | None = None
        self.is_dropped = False
        """Not in the index any more: evicted, or registered by a step that failed."""
        self.state: SavedState | None = None
        """For models with states: the one after its last token, while `StateEntries` lets it have one."""

    @property
    def children(self) -> SortedByTokens[PrefixEntry] | None:
        """Child entries, read only; None if there are none."""
        return unpacked(self._children)


class StateEntries:
    """The prefix entries that hold a state: at most so many, the least recently used lose theirs."""

    def __init__(self, max_states: int) -> None:
        self.max_states = max_states
        self._entries: OrderedDict[PrefixEntry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PrefixEntry]:
        return iter(self._entries)

    def give(self, entry: PrefixEntry, state: SavedState) -> bool:
        """Lets an entry hold a state, unless it has one; returns whether it holds this one."""
        if entry.is_dropped or entry.state is not None:
            return False
        entry.state = state
        self.use(entry)
        while len(self._entries) > self.max_states:
            oldest, _ = self._entries.popitem(last=False)
            oldest.state = None
        return entry.state is state

    def use(self, entry: PrefixEntry) -> None:
        """Notes that the state of an entry is used."""
        self._entries[entry] = None
        self._entries.move_to_end(entry)

    def take(self, entry: PrefixEntry) -> None:
        """Takes the state of an entry away; safe where there is none."""
        entry.state = None
        self._entries.pop(entry, None)


class HasTokens(Protocol):
    """An item with tokens that never change."""

    @property
    def tokens(self) -> bytes:
        """Encoded token ids."""


ItemT = TypeVar("ItemT", bound=HasTokens)


class SortedByTokens(Generic[ItemT]):
    """Items sorted by their encoded tokens, in buckets so that costs stay flat from a thousand to a million.

        [[aa, ab, ad], [ba, bbc, bbd], …]         nearest("abc") is ab or ad: the neighbours of its insertion point

    The item with the longest common prefix with some tokens is right before or right after them in this order, so one
    binary search finds it. No two items have equal tokens.

    Invariants:
        no bucket is empty; all tokens are in ascending order, across buckets too
    Always safe: discarding an absent item.
    """

    __slots__ = ("_buckets",)

    def __init__(self, first: ItemT) -> None:
        self._buckets = [[first]]

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __iter__(self) -> Iterator[ItemT]:
        return (item for bucket in self._buckets for item in bucket)

    def add(self, item: ItemT) -> None:
        """Inserts an item."""
        if not self._buckets:
            self._buckets = [[]]
        number = self._bucket_of(item.tokens)
        bucket = self._buckets[number]
        bucket.insert(bisect_left(bucket, item.tokens, key=_tokens_of), item)
        if len(bucket) > _MAX_IN_A_BUCKET:
            half = len(bucket) // 2
            self._buckets[number : number + 1] = [bucket[:half], bucket[half:]]

    def discard(self, item: ItemT) -> None:
        """Removes an item."""
        if not self._buckets:
            return
        number = self._bucket_of(item.tokens)
        bucket = self._buckets[number]
        index = bisect_left(bucket, item.tokens, key=_tokens_of)
        if index < len(bucket) and bucket[index] is item:
            del bucket[index]
            if not bucket:
                del self._buckets[number]

    def neighbours(self, tokens: bytes) -> tuple[ItemT | None, ItemT | None]:
        """The last item before some tokens, and the first one equal to or after them."""
        return next(self.before(tokens), None), next(self.behind(tokens), None)

    def before(self, tokens: bytes) -> Iterator[ItemT]:
        """The items before some tokens, nearest first."""
        number, index = self._place_of(tokens)
        while number >= 0:
            bucket = self._buckets[number]
            yield from (bucket[place] for place in range(index - 1, -1, -1))
            number -= 1
            index = len(self._buckets[number])

    def behind(self, tokens: bytes) -> Iterator[ItemT]:
        """The items equal to or after some tokens, nearest first."""
        number, index = self._place_of(tokens)
        while 0 <= number < len(self._buckets):
            bucket = self._buckets[number]
            yield from (bucket[place] for place in range(index, len(bucket)))
            number, index = number + 1, 0

    def packed(self) -> ItemT | SortedByTokens[ItemT] | None:
        """The compact stored form: None for no item, and the item itself for one, since most have no siblings."""
        if len(self._buckets) == 1 and len(self._buckets[0]) == 1:
            return self._buckets[0][0]
        return self if self._buckets else None

    def check_invariants(self) -> None:
        """Checks the order."""
        assert all(self._buckets)
        tokens = [item.tokens for item in self]
        assert tokens == sorted(set(tokens))

    def _place_of(self, tokens: bytes) -> tuple[int, int]:
        """The bucket of some tokens (or of their insertion point), and the index in it; bucket -1 if there are none."""
        if not self._buckets:
            return -1, 0
        number = self._bucket_of(tokens)
        return number, bisect_left(self._buckets[number], tokens, key=_tokens_of)

    def _bucket_of(self, tokens: bytes) -> int:
        """The bucket of some tokens, or of their insertion point."""
        return max(bisect_right(self._buckets, tokens, lo=1, key=_first_tokens_of) - 1, 0)


def unpacked(kept: ItemT | SortedByTokens[ItemT] | None) -> SortedByTokens[ItemT] | None:
    """The items, from what `packed` returned; pack them again after a change."""
    return kept if kept is None or isinstance(kept, SortedByTokens) else SortedByTokens(kept)


def num_alike(one: bytes, other: bytes) -> int:
    """Length of the common prefix of two runs, in encoded tokens."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return (length - (difference.bit_length() + 7) // 8) // TOKEN_BYTES


def _tokens_of(item: HasTokens) -> bytes:
    return item.tokens


def _first_tokens_of(bucket: list[ItemT]) -> bytes:
    return bucket[0].tokens
