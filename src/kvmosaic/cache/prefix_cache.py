"""The prefix cache: blocks of the request pool, found again by everything up to their last token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.keys import Key
from kvmosaic.eviction import Candidate, EvictionPolicy, EvictionQueue


class PrefixEntry:
    """One cached block: the tokens in it, after everything its parents hold."""

    __slots__ = ("block_id", "children", "is_dropped", "key", "last_used", "parent", "root", "tokens", "users")

    def __init__(self, key: Key, root: Key, parent: PrefixEntry | None, tokens: bytes, block_id: BlockId) -> None:
        self.key = key
        self.root = root
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.users = 0
        """Attachments that hold this entry; they hold all of its parents too."""
        self.children: set[PrefixEntry] = set()
        self.last_used = 0.0
        self.is_dropped = False
        """No longer to be found: evicted, or registered by a step that failed."""


class PrefixCache:
    """Blocks that were computed before, as a forest under their chained keys; it owns one reference to each.

        root(system)                   root(question after system, A at d, B at d')
          └─ block 0   users 3           └─ block 0   users 1
               ├─ block 1   users 2
               │    └─ tail (5 tokens)   users 2        closed spans only
               └─ block 1'  users 1

    Full blocks of any span are kept, and the partly filled last block of a closed span (a system prompt), because
    nothing will be written behind its tokens any more. Whoever holds an entry holds the way up to its root, so
    `users` never grows on the way down, and an entry without users has no child with users.

    Invariants:
        an entry in the index has a parent in the index (or none), and the parent lists it as a child
        in line for eviction are exactly the entries without users and without children: children leave before parents
        num_idle == entries without users == blocks that eviction could free, given the time
    Always safe: `evict(0)`; dropping an entry twice.

    Two writers of the same content: the first entry stays, the second writer keeps its own block for itself.
    """

    def __init__(
        self, pool: BlockPool, policy: EvictionPolicy, clock: Callable[[], float], *, verify: bool = True
    ) -> None:
        self.pool = pool
        self.num_evictions = 0
        self.num_idle = 0
        self._entries: dict[Key, PrefixEntry] = {}
        self._queue: EvictionQueue[PrefixEntry] = EvictionQueue(policy)
        self._clock = clock
        self._verify = verify

    def __len__(self) -> int:
        return len(self._entries)

    def block_ids(self) -> list[BlockId]:
        """The blocks that it keeps."""
        return [entry.block_id for entry in self._entries.values()]

    def match(self, root: Key, keys: Iterable[Key], blocks: Sequence[bytes]) -> list[PrefixEntry]:
        """The entries for the longest known run of `keys`, from the first block on.

        Args:
            root: key of the span before its first token.
            keys: chained keys of its blocks; read only as far as they are known.
            blocks: the encoded tokens of each block, compared when `verify` is on.
        """
        entries: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        for key, tokens in zip(keys, blocks, strict=False):
            entry = self._entries.get(key)
            if entry is None or not self._is_same(entry, root, parent, tokens):
                break
            entries.append(entry)
            parent = entry
        return entries

    def hold(self, entries: Iterable[PrefixEntry]) -> None:
        """Adds a user to each entry; a reader also retains the blocks for its table."""
        now = self._clock()
        for entry in entries:
            assert not entry.is_dropped
            if entry.users == 0:
                self.num_idle -= 1
                self._queue.discard(entry)
            entry.users += 1
            entry.last_used = now

    def leave(self, entries: Iterable[PrefixEntry]) -> None:
        """Takes a user from each entry; those without any may be evicted from now on."""
        now = self._clock()
        for entry in entries:
            assert entry.users > 0
            entry.users -= 1
            entry.last_used = now
            if entry.users == 0 and not entry.is_dropped:
                self.num_idle += 1
                self._line_up(entry)

    def register(
        self, key: Key, root: Key, parent: PrefixEntry | None, tokens: bytes, block_id: BlockId
    ) -> tuple[PrefixEntry | None, bool]:
        """Makes a computed block known and holds it for its writer, who holds its parent already.

        Returns:
            The entry for this content and whether it is new. It is an older one if somebody was faster; None if it
            cannot be kept: the key is taken by other tokens, or its parent is no longer known.
        """
        assert parent is None or parent.users, "a writer holds everything before the block it writes"
        entry = self._entries.get(key)
        is_new = entry is None
        if entry is None:
            if parent is not None and parent.is_dropped:
                return None, False
            entry = PrefixEntry(key, root, parent, tokens, block_id)
            self.pool.retain((block_id,))
            self._entries[key] = entry
            self.num_idle += 1
            if parent is not None:
                parent.children.add(entry)
        elif not self._is_same(entry, root, parent, tokens):
            return None, False
        self.hold((entry,))
        return entry, is_new

    def evict(self, count: int) -> int:
        """Frees up to `count` blocks of entries that nobody holds; returns how many it was."""
        done = 0
        while done < count and (entry := self._queue.pop()) is not None:
            self._forget(entry)
            self.num_idle -= 1
            if (parent := entry.parent) is not None:
                parent.children.discard(entry)
                if parent.users == 0:
                    self._line_up(parent)
            done += 1
        self.num_evictions += done
        return done

    def clear(self) -> None:
        """Frees everything that nobody holds; not counted as evictions."""
        before = self.num_evictions
        self.evict(self.num_idle)
        self.num_evictions = before

    def drop(self, entry: PrefixEntry) -> None:
        """Makes an entry and everything computed after it unknown, held or not."""
        if entry.is_dropped:
            return
        if (parent := entry.parent) is not None:
            parent.children.discard(entry)
            if parent.users == 0:
                self._line_up(parent)
        falling = [entry]
        while falling:
            fallen = falling.pop()
            falling.extend(fallen.children)
            fallen.children.clear()
            self._queue.discard(fallen)
            self.num_idle -= fallen.users == 0
            self._forget(fallen)

    def check_invariants(self) -> None:
        """Checks index, tree, line and references against each other."""
        for key, entry in self._entries.items():
            assert entry.key == key and not entry.is_dropped and entry.users >= 0
            assert self.pool.reference_count(entry.block_id) >= 1
            assert all(child.parent is entry and self._entries.get(child.key) is child for child in entry.children)
            assert all(child.users <= entry.users for child in entry.children)
            parent = entry.parent
            assert parent is None or (self._entries.get(parent.key) is parent and entry in parent.children)
            assert (entry in self._queue) == (entry.users == 0 and not entry.children)
        idle = [entry for entry in self._entries.values() if entry.users == 0]
        assert len(idle) == self.num_idle
        assert len(self._queue) <= len(idle)
        assert all(self.pool.reference_count(entry.block_id) == 1 for entry in idle)
        assert len({entry.block_id for entry in self._entries.values()}) == len(self._entries)

    def _line_up(self, entry: PrefixEntry) -> None:
        if not entry.children:
            self._queue.add(entry, Candidate(entry.last_used, self.pool.block_size))

    def _forget(self, entry: PrefixEntry) -> None:
        del self._entries[entry.key]
        entry.is_dropped = True
        self.pool.release((entry.block_id,))

    def _is_same(self, entry: PrefixEntry, root: Key, parent: PrefixEntry | None, tokens: bytes) -> bool:
        return not self._verify or (entry.tokens == tokens and entry.parent is parent and entry.root == root)
