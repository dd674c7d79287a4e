"""The prefix cache: blocks of the request pool, keyed by all tokens up to their last one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.keys import TOKEN_BYTES, Key
from kvmosaic.cache.prefix_entry import Holder, PrefixEntry, SortedByTokens, StateEntries, num_alike, unpacked
from kvmosaic.eviction import Candidate, EvictionPolicy, EvictionQueue

MIN_FIRST_TOKENS = 8
"""At the start of a span, fewer common tokens are a template's words, and not worth copying a block."""
_MAX_SIBLINGS = 32
"""Entries that are tried in a search for one with a state."""


class PrefixCache:
    """A radix tree of computed blocks under their chained keys; it owns one reference to each block.

        root(system)                   root(question after system, A at d, B at d')
          └─ block 0   refs 3            └─ block 0   refs 1
               ├─ block 1   refs 2            └─ tail (9 tokens)   a conversation that may go on
               │    └─ tail (5 tokens)   refs 2
               └─ block 1'  refs 1

    Full blocks of any span are cached, and a span's partly filled last block (a tail) once no token will follow in it.
    A holder of an entry holds all of its ancestors, so `ref_count` never grows on the way down, and an unreferenced
    entry has no referenced child.

    A closed span shares a block that begins with its last tokens, whatever follows in it. A growing span never writes
    into such a block: it copies the block up to the last common token (`nearest`). So only the difference is computed,
    wherever in a block two conversations diverge.

    Invariants:
        an entry in the index is a child of an entry in the index, or listed under its root
        the eviction queue holds exactly the unreferenced leaves: children are evicted before parents
        num_idle == unreferenced entries == blocks that repeated eviction can free
    Always safe: `evict(0)`; dropping an entry twice.

    Two writers of the same content: the first entry stays, the second writer's block stays private.
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        bytes_per_block: int = 1,
        verify: bool = True,
        max_states: int = 0,
    ) -> None:
        self.pool = pool
        self.states = StateEntries(max_states)
        """The entries that hold a state, for models with states."""
        self.num_evictions = 0
        self.bytes_per_block = bytes_per_block
        """Of all layers together."""
        self.num_idle = 0
        self.unwritten_step = -1
        """The step being assembled: what it registers may be read by it, but not copied yet; -1 for none."""
        self._entries: dict[Key, PrefixEntry] = {}
        self._roots: dict[Key, PrefixEntry | SortedByTokens[PrefixEntry]] = {}
        """The entries without a parent, by root."""
        self._outgrown: list[PrefixEntry] = []
        """Tails that a block of the step being assembled extends."""
        self._queue: EvictionQueue[PrefixEntry] = EvictionQueue()
        self._policy = policy
        self._evicted_rank = 0.0
        self._numbers = itertools.count()
        self._clock = clock
        self._verify = verify

    def __len__(self) -> int:
        return len(self._entries)

    def block_ids(self) -> list[BlockId]:
        """The blocks of all entries."""
        return [entry.block_id for entry in self._entries.values()]

    def children_of(self, root: Key, parent: PrefixEntry | None) -> SortedByTokens[PrefixEntry] | None:
        """The entries right after `parent`, or after `root`, read only; None if there are none."""
        return unpacked(self._packed_children(root, parent))

    def begin_step(self, step: int) -> None:
        """Starts assembling a step, with its number."""
        self.unwritten_step = step

    def end_step(self) -> None:
        """Ends the step: what it registered may be copied, and outgrown tails are dropped."""
        self.unwritten_step = -1
        self._drop_outgrown()

    def match(self, root: Key, keys: Iterable[Key], blocks: Sequence[bytes]) -> list[PrefixEntry]:
        """The entries of the longest cached run of `keys`, from the first block on.

        Args:
            root: key of the span before its first token.
            keys: chained keys of its blocks; consumed only as far as they are cached.
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

    def covering(self, root: Key, parent: PrefixEntry | None, tokens: bytes) -> PrefixEntry | None:
        """An entry right after `parent` (or `root`) that begins with all of these tokens."""
        siblings = self.children_of(root, parent)
        entry = siblings.neighbours(tokens)[1] if siblings else None
        return entry if entry is not None and entry.tokens.startswith(tokens) else None

    def nearest(self, root: Key, parent: PrefixEntry | None, tokens: bytes) -> tuple[PrefixEntry | None, int]:
        """The entry right after `parent` (or `root`) with the longest common prefix with these tokens, and its length.

        Entries that are not written yet, or not worth a copy, are ignored.
        """
        siblings = self.children_of(root, parent)
        best: tuple[PrefixEntry | None, int] = (None, 0)
        for direction in (siblings.before(tokens), siblings.behind(tokens)) if siblings else ():
            entry = next((entry for entry in direction if entry.step != self.unwritten_step), None)
            if entry is not None:
                alike = num_alike(entry.tokens, tokens)
                is_worth_it = (
                    parent is not None or alike >= MIN_FIRST_TOKENS or entry.tokens == tokens[: len(entry.tokens)]
                )
                if alike > best[1] and is_worth_it:
                    best = entry, alike
        return best

    def with_state(self, root: Key, parent: PrefixEntry | None, tokens: bytes) -> PrefixEntry | None:
        """The longest entry right after `parent` (or `root`) with a state, all of whose tokens these begin with.

        Entries that are not written yet are ignored.
        """
        siblings = self.children_of(root, parent)
        for entry in itertools.islice(siblings.before(tokens + b"\0"), _MAX_SIBLINGS) if siblings else ():
            if entry.state is not None and entry.step != self.unwritten_step and tokens.startswith(entry.tokens):
                return entry
        return None

    def acquire(self, entries: Iterable[PrefixEntry]) -> None:
        """Adds a reference to each entry; a reader also retains the blocks for its table."""
        now = self._clock()
        for entry in entries:
            assert not entry.is_dropped
            if entry.ref_count == 0:
                self.num_idle -= 1
                self._dequeue(entry)
            entry.ref_count += 1
            entry.last_used = now

    def release(self, entries: Iterable[PrefixEntry], holder: Holder | None = None) -> None:
        """Removes a reference from each entry; unreferenced ones may be evicted from now on.

        Args:
            entries: what is released.
            holder: the sequence that held them, for the eviction policy; None: the one before.
        """
        now = self._clock()
        for entry in entries:
            assert entry.ref_count > 0
            entry.ref_count -= 1
            entry.last_used = now
            entry.last_holder = holder or entry.last_holder
            if entry.ref_count == 0 and not entry.is_dropped:
                self.num_idle += 1
                self._enqueue(entry)

    def register(
        self, key: Key, root: Key, parent: PrefixEntry | None, tokens: bytes, block_id: BlockId, step: int = 0
    ) -> tuple[PrefixEntry | None, bool]:
        """Registers a computed block and acquires it for its writer, who holds its parent already.

        An unreferenced tail is dropped when a block is written that begins with all of its tokens.

        Args:
            key: chained key of the block.
            root: key of the span before its first token.
            parent: the block before it.
            tokens: its encoded tokens; fewer than a block holds, if no token will follow.
            block_id: its block.
            step: the step that computes the last of them.

        Returns:
            The entry for this content and whether it is new. It is an older one if another writer was first, for a tail
            perhaps one with more tokens; None if it cannot be cached: the key is taken by other tokens, or its parent
            has been dropped.
        """
        assert parent is None or parent.ref_count, "a writer holds everything before the block it writes"
        entry = self._entries.get(key)
        is_new = entry is None
        if entry is None:
            if parent is not None and parent.is_dropped:
                return None, False
            if (longer := self.covering(root, parent, tokens)) is not None:
                entry, is_new = longer, False
            else:
                root = parent.root if parent is not None else root  # the same bytes, once in memory
                entry = self._add(PrefixEntry(key, root, parent, tokens, block_id, step))
        elif not self._is_same(entry, root, parent, tokens):
            return None, False
        self.acquire((entry,))
        return entry, is_new

    def evict(self, count: int) -> int:
        """Evicts up to `count` unreferenced entries, one block each; returns how many."""
        done = 0
        while done < count and (entry := self._queue.first()) is not None:
            assert entry.queue_entry is not None
            self._evicted_rank = max(self._evicted_rank, entry.queue_entry[0])
            self._queue.remove(entry)
            self._forget(entry)
            self.num_idle -= 1
            self._take_out(entry)
            done += 1
        self.num_evictions += done
        return done

    def clear(self) -> None:
        """Drops all unreferenced entries; not counted as evictions."""
        before = self.num_evictions
        self.evict(self.num_idle)
        self.num_evictions = before

    def drop(self, entry: PrefixEntry) -> None:
        """Drops an entry and everything computed after it, referenced or not."""
        if entry.is_dropped:
            return
        self._take_out(entry)
        falling = [entry]
        while falling:
            fallen = falling.pop()
            falling.extend(fallen.children or ())
            fallen._children = None
            self._dequeue(fallen)
            self.num_idle -= fallen.ref_count == 0
            self._forget(fallen)

    def check_invariants(self) -> None:
        """Checks index, tree, eviction queue and references against each other."""
        for key, entry in self._entries.items():
            assert entry.key == key and not entry.is_dropped and entry.ref_count >= 0
            assert self.pool.reference_count(entry.block_id) >= 1
            children = entry.children or ()
            assert all(child.parent is entry and self._entries.get(child.key) is child for child in children)
            assert all(child.ref_count <= entry.ref_count and child.root == entry.root for child in children)
            assert entry.children is None or len(entry.tokens) == self.pool.block_size * TOKEN_BYTES
            parent = entry.parent
            assert parent is None or self._entries.get(parent.key) is parent
            siblings = self.children_of(entry.root, parent)
            assert siblings is not None and siblings.neighbours(entry.tokens)[1] is entry
            assert (entry.queue_entry is not None) == (entry.ref_count == 0 and not entry.children)
        firsts = map(unpacked, self._roots.values())
        for siblings in (*firsts, *(entry.children for entry in self._entries.values())):
            assert siblings is None or len(siblings), "a place without entries is forgotten"
            if siblings is not None:
                siblings.check_invariants()
        idle = [entry for entry in self._entries.values() if entry.ref_count == 0]
        assert len(idle) == self.num_idle
        assert len(self._queue) == sum(entry.queue_entry is not None for entry in self._entries.values())
        assert all(self.pool.reference_count(entry.block_id) == 1 for entry in idle)
        assert len({entry.block_id for entry in self._entries.values()}) == len(self._entries)

    def _packed_children(
        self, root: Key, parent: PrefixEntry | None
    ) -> PrefixEntry | SortedByTokens[PrefixEntry] | None:
        return self._roots.get(root) if parent is None else parent._children

    def _set_packed_children(
        self, root: Key, parent: PrefixEntry | None, kept: PrefixEntry | SortedByTokens[PrefixEntry] | None
    ) -> None:
        if parent is not None:
            parent._children = kept
        elif kept is not None:
            self._roots[root] = kept
        else:
            self._roots.pop(root, None)

    def _add(self, entry: PrefixEntry) -> PrefixEntry:
        """Inserts a new entry; a tail that it extends is dropped when the entry is written."""
        self.pool.retain((entry.block_id,))
        self._entries[entry.key] = entry
        self.num_idle += 1
        siblings = self.children_of(entry.root, entry.parent)
        if siblings is None:
            self._set_packed_children(entry.root, entry.parent, entry)
            return entry
        siblings.add(entry)
        self._set_packed_children(entry.root, entry.parent, siblings.packed())
        before = siblings.neighbours(entry.tokens)[0]
        if before is not None and entry.tokens.startswith(before.tokens):
            self._outgrown.append(before)
            if self.unwritten_step < 0:
                self._drop_outgrown()
        return entry

    def _drop_outgrown(self) -> None:
        """Drops unreferenced tails with a block that begins with all of their tokens."""
        for tail in self._outgrown:
            siblings = self.children_of(tail.root, tail.parent)
            if tail.ref_count == 0 and not tail.is_dropped and siblings is not None:
                behind = siblings.neighbours(tail.tokens + b"\0")[1]
                if behind is not None and behind.tokens.startswith(tail.tokens):
                    self.drop(tail)
        self._outgrown.clear()

    def _take_out(self, entry: PrefixEntry) -> None:
        """Removes an entry from its parent's children; a parent that becomes a leaf enters the eviction queue."""
        parent, kept = entry.parent, self._packed_children(entry.root, entry.parent)
        if kept is entry:
            self._set_packed_children(entry.root, parent, None)
        elif (siblings := unpacked(kept)) is not None:
            siblings.discard(entry)
            self._set_packed_children(entry.root, parent, siblings.packed())
        if parent is not None and parent.ref_count == 0:
            self._enqueue(parent)

    def _enqueue(self, entry: PrefixEntry) -> None:
        if entry._children is None:
            candidate = Candidate(
                entry.last_used,
                len(entry.tokens) // TOKEN_BYTES,
                entry.last_holder.priority,
                entry.last_holder.progress,
                entry.hits,
                num_bytes=self.bytes_per_block,
                evicted_rank=self._evicted_rank,
            )
            entry.queue_entry = (self._policy.rank(candidate), next(self._numbers), entry)
            self._queue.push(entry)

    def _dequeue(self, entry: PrefixEntry) -> None:
        if entry.queue_entry is not None:
            self._queue.remove(entry)

    def _forget(self, entry: PrefixEntry) -> None:
        del self._entries[entry.key]
        entry.is_dropped = True
        if entry.state is not None:
            self.states.take(entry)
        self.pool.release((entry.block_id,))

    def _is_same(self, entry: PrefixEntry, root: Key, parent: PrefixEntry | None, tokens: bytes) -> bool:
        return not self._verify or (entry.tokens == tokens and entry.parent is parent and entry.root == root)
