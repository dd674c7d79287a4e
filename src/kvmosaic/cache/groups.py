"""Groups: a multimap with few members under each of very many keys; chunks of equal tokens or equal first tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from kvmosaic.cache.block_pool import BlockId
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.keys import TOKEN_BYTES, Key
from kvmosaic.cache.prefix_entry import SortedByTokens, num_alike, unpacked

PlaceT = TypeVar("PlaceT", bound=Hashable)
MemberT = TypeVar("MemberT", bound=Hashable)


class Groups(Generic[PlaceT, MemberT]):
    """Multimap: members by place, in insertion order. A member is anything hashable that is not a dictionary.

        "guide"   -> a                   almost every place has one member, stored directly
        "manual"  -> {b, c, d}           several are an ordered set: more than 200 bytes, only where needed

    Invariant: a place without members is removed.
    Always safe: adding a present member, discarding an absent one.
    """

    __slots__ = ("_members",)

    def __init__(self) -> None:
        self._members: dict[PlaceT, MemberT | dict[MemberT, None]] = {}

    def __len__(self) -> int:
        """Number of places."""
        return len(self._members)

    def __iter__(self) -> Iterator[PlaceT]:
        return iter(self._members)

    def add(self, place: PlaceT, member: MemberT) -> None:
        """Adds a member to a place."""
        present = self._members.setdefault(place, member)
        if isinstance(present, dict):
            present[member] = None
        elif present != member:
            self._members[place] = {present: None, member: None}

    def discard(self, place: PlaceT, member: MemberT) -> None:
        """Removes a member from a place."""
        present = self._members.get(place)
        if isinstance(present, dict):
            present.pop(member, None)
            if len(present) == 1:
                (self._members[place],) = present
        elif present == member and present is not None:
            del self._members[place]

    def members(self, place: PlaceT) -> tuple[MemberT, ...]:
        """The members of a place, oldest first."""
        present = self._members.get(place)
        if isinstance(present, dict):
            return tuple(present)
        return () if present is None else (present,)


Twin = Literal["", "other_system_text", "other_companions"]
"""What the same text was computed after, where that differs; empty: it is not cached."""


class SameTextIndex:
    """Tells, when a chunk misses, whether it is cached after another system text, or after other companions.

    Such a miss is easily overlooked: a document warmed without the system text of the later requests is recomputed.
    Only chunks that saw no other chunk are indexed; a lookup hashes the tokens once.
    """

    def __init__(self) -> None:
        self._chunks: Groups[tuple[str, str, bytes], Chunk] = Groups()
        self._systems: dict[Chunk, Key] = {}

    def __len__(self) -> int:
        return sum(len(self._chunks.members(place)) for place in self._chunks)

    def add(self, chunk: Chunk, system: Key) -> None:
        """Indexes a chunk that lookups can find; `system` is the key of the system text that it saw."""
        self._chunks.add((chunk.tenant, chunk.salt, chunk.tokens), chunk)
        self._systems[chunk] = system

    def discard(self, chunk: Chunk) -> None:
        """Removes a chunk; safe for an absent one."""
        self._chunks.discard((chunk.tenant, chunk.salt, chunk.tokens), chunk)
        self._systems.pop(chunk, None)

    def twin(self, tenant: str, salt: str, tokens: bytes, system: Key) -> Twin:
        """What a complete chunk of these tokens saw instead; ask after a miss."""
        systems = {self._systems[chunk] for chunk in self._chunks.members((tenant, salt, tokens)) if chunk.is_ready}
        if system in systems:
            return "other_companions"
        return "other_system_text" if systems else ""

    def check_invariants(self, present: Mapping[Key, Chunk]) -> None:
        """Checks that exactly the chunks that lookups find are indexed, each in its place."""
        for place in self._chunks:
            chunks = self._chunks.members(place)
            assert chunks, "a place without chunks is forgotten"
            for chunk in chunks:
                assert present.get(chunk.key) is chunk
                assert (chunk.tenant, chunk.salt, chunk.tokens) == place
        assert len(self._systems) == len(self)


class HasStart(Protocol):
    """A text with a root, cached or yet to be computed."""

    @property
    def root(self) -> Key:
        """Key of what it sees and where it starts."""

    @property
    def tokens(self) -> bytes:
        """Its token ids, encoded."""


TextT = TypeVar("TextT", bound=HasStart)
TextT_co = TypeVar("TextT_co", bound=HasStart, covariant=True)


@dataclass(frozen=True, slots=True)
class SharedStart(Generic[TextT_co]):
    """The first blocks of a text, to be shared by a new chunk with the same first tokens."""

    source: TextT_co
    num_blocks: int


class Starts(Generic[TextT]):
    """Finds the text with the longest common prefix among those with the same root.

        root, first block      [ab…, ad…, b…]      find("abc…") is ab… or ad…: the neighbours in the order of tokens

    Keys and values of a token are determined by the root and the tokens up to it, so the full blocks of the common
    prefix are those of a new chunk, too. One entry per text. A lookup takes O(log n) comparisons among the n texts with
    the same first block, which are few, unless documents begin alike.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._places: dict[tuple[Key, bytes], TextT | SortedByTokens[TextT]] = {}
        """The texts with a root and a first block, packed: most have these for themselves."""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[TextT]:
        return (text for packed in self._places.values() for text in unpacked(packed) or ())

    def add(self, text: TextT) -> None:
        """Adds a text, unless it has no full block. Of two with equal tokens only the first is added."""
        if len(text.tokens) < self._block_size * TOKEN_BYTES:
            return
        place = self._place_of(text.root, text.tokens)
        if (texts := unpacked(self._places.get(place))) is None:
            self._places[place] = text
        elif (present := texts.neighbours(text.tokens)[1]) is None or present.tokens != text.tokens:
            texts.add(text)
            self._places[place] = texts

    def discard(self, text: TextT) -> None:
        """Removes a text; safe for an absent one."""
        place = self._place_of(text.root, text.tokens)
        if (texts := unpacked(self._places.get(place))) is None:
            return
        texts.discard(text)
        if (packed := texts.packed()) is None:
            del self._places[place]
        else:
            self._places[place] = packed

    def find(self, root: Key, tokens: bytes) -> SharedStart[TextT] | None:
        """The longest run of full blocks that a new chunk can share; it computes its last token at least.

        Args:
            root: key of what the chunk sees and where it starts.
            tokens: its encoded tokens.
        """
        if (texts := unpacked(self._places.get(self._place_of(root, tokens)))) is None:
            return None
        best = None
        max_tokens = len(tokens) // TOKEN_BYTES - 1
        for text in texts.neighbours(tokens):
            if text is not None:
                num_blocks = min(num_alike(text.tokens, tokens), max_tokens) // self._block_size
                if num_blocks > (0 if best is None else best.num_blocks):
                    best = SharedStart(text, num_blocks)
        return best

    def num_shared(self, root: Key, tokens: bytes) -> int:
        """Tokens in the blocks that a new chunk can share; see `find`."""
        shared = self.find(root, tokens)
        return 0 if shared is None else shared.num_blocks * self._block_size

    def _place_of(self, root: Key, tokens: bytes) -> tuple[Key, bytes]:
        return root, tokens[: self._block_size * TOKEN_BYTES]


@dataclass(slots=True)
class BlockCount:
    """Blocks of several chunks, each counted once; or the chunks that hold one block."""

    total: int = 0
    idle: int = 0
    """Of these, the evictable ones: every chunk that holds them is idle."""
    pinned: int = 0
    """Of these, blocks that a pinned chunk holds."""


class SharedBlocks:
    """Counts blocks once, however many chunks hold them.

        chunk a   [ 0 1 2 3 4 ]         num_shared 3       block 0: 2 holders, …, 2: 2 holders
        chunk b   [ 0 1 2 7 8 ]         num_shared 3       blocks 3, 4, 7 and 8 are not listed: one holder each

    A block is idle if all of its holders are idle, and pinned if one of them is. Holders are chunks in the index, and
    dropped ones in use.

    Invariant: a block beyond the first `num_shared` of a chunk has this chunk as its only holder.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockId, BlockCount] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def share(self, start: SharedStart[Chunk], chunk: Chunk) -> None:
        """Records that a new chunk holds the first blocks of another one, which is in use."""
        source = start.source
        assert source.ref_count > 0, "so none of its blocks is idle"
        for block_id in source.block_ids[: start.num_blocks]:
            holders = self._holders.get(block_id)
            if holders is None:
                holders = self._holders[block_id] = BlockCount(1, 0, int(source.pinned))
            holders.total += 1
        source.num_shared = max(source.num_shared, start.num_blocks)
        chunk.num_shared = start.num_blocks

    def free(self, chunk: Chunk) -> BlockCount:
        """Removes a holder; returns how many blocks have no holder any more, and how many become idle by this."""
        changed = BlockCount(total=chunk.num_blocks - chunk.num_shared)
        for block_id, holders in self._listed(chunk):
            holders.total -= 1
            if not holders.total:
                del self._holders[block_id]
                changed.total += 1
            else:
                changed.idle += holders.idle == holders.total
        return changed

    def set_idle(self, chunk: Chunk, sign: int) -> int:
        """Records that a chunk becomes idle (1) or ceases to be (-1); returns how many blocks do."""
        count = chunk.num_blocks - chunk.num_shared
        for _, holders in self._listed(chunk):
            count += holders.idle + max(sign, 0) == holders.total
            holders.idle += sign
        return count

    def set_pinned(self, chunk: Chunk, sign: int) -> int:
        """Records that a chunk becomes pinned (1) or ceases to be (-1); returns how many blocks do."""
        count = chunk.num_blocks - chunk.num_shared
        for _, holders in self._listed(chunk):
            count += holders.pinned + min(sign, 0) == 0
            holders.pinned += sign
        return count

    def count(self, chunks: Iterable[Chunk]) -> BlockCount:
        """Blocks of some chunks."""
        found, listed = BlockCount(), dict[BlockId, BlockCount]()
        for chunk in chunks:
            num_own = chunk.num_blocks - chunk.num_shared
            found.total += num_own
            found.idle += num_own * chunk.is_evictable
            found.pinned += num_own * chunk.pinned
            listed.update(self._listed(chunk))
        for holders in listed.values():
            found.total += 1
            found.idle += holders.idle == holders.total
            found.pinned += holders.pinned > 0
        return found

    def num_freed_by(self, chunks: Iterable[Chunk]) -> int:
        """Blocks that are free or idle once these chunks, which are in use, are released."""
        count, leaving = 0, dict[BlockId, int]()
        for chunk in chunks:
            count += chunk.num_blocks - chunk.num_shared
            for block_id, _ in self._listed(chunk):
                leaving[block_id] = leaving.get(block_id, 0) + 1
        for block_id, num_leaving in leaving.items():
            holders = self._holders[block_id]
            count += holders.idle + num_leaving == holders.total
        return count

    def num_holders(self) -> Iterator[tuple[BlockId, int]]:
        """The shared blocks, each with the number of chunks that hold it."""
        return ((block_id, holders.total) for block_id, holders in self._holders.items())

    def check_invariants(self, chunks: Iterable[Chunk]) -> None:
        """Checks the counts against all chunks that hold blocks."""
        present, counted = list(chunks), dict[BlockId, BlockCount]()
        for chunk in present:
            for block_id in chunk.block_ids:
                holders = counted.setdefault(block_id, BlockCount())
                holders.total += 1
                holders.idle += chunk.is_evictable
                holders.pinned += chunk.pinned
        for chunk in present:
            assert all(block_id in self._holders for block_id in chunk.block_ids[: chunk.num_shared])
            assert all(counted[block_id].total == 1 for block_id in chunk.block_ids[chunk.num_shared :])
        assert self._holders.items() <= counted.items()

    def _listed(self, chunk: Chunk) -> Iterator[tuple[BlockId, BlockCount]]:
        """The blocks of a chunk that others hold or have held, too."""
        return ((block_id, self._holders[block_id]) for block_id in chunk.block_ids[: chunk.num_shared])
