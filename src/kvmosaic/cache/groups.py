"""Groups: a multimap with few members under each of very many keys."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

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
