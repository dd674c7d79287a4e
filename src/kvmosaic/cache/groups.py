"""Groups: a multimap with few members under each of very many keys, and the index of chunks of equal tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.keys import Key

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


class SameTextIndex:
    """Tells, when a chunk misses, whether it is cached after another system text.

    Such a miss is easily overlooked: a document warmed without the system text of the later requests is recomputed.
    Only chunks that saw nothing but the system text are indexed; a lookup hashes the tokens once.
    """

    def __init__(self) -> None:
        self._chunks: Groups[tuple[str, str, bytes], Chunk] = Groups()

    def __len__(self) -> int:
        return sum(len(self._chunks.members(place)) for place in self._chunks)

    def add(self, chunk: Chunk) -> None:
        """Indexes a chunk that lookups can find."""
        self._chunks.add((chunk.tenant, chunk.salt, chunk.tokens), chunk)

    def discard(self, chunk: Chunk) -> None:
        """Removes a chunk; safe for an absent one."""
        self._chunks.discard((chunk.tenant, chunk.salt, chunk.tokens), chunk)

    def has_ready(self, tenant: str, salt: str, tokens: bytes) -> bool:
        """Whether a chunk of these tokens is complete; ask after a miss."""
        return any(chunk.is_ready for chunk in self._chunks.members((tenant, salt, tokens)))

    def check_invariants(self, present: Mapping[Key, Chunk]) -> None:
        """Checks that exactly the chunks that lookups find are indexed, each in its place."""
        for place in self._chunks:
            chunks = self._chunks.members(place)
            assert chunks, "a place without chunks is forgotten"
            for chunk in chunks:
                assert present.get(chunk.key) is chunk
                assert (chunk.tenant, chunk.salt, chunk.tokens) == place
