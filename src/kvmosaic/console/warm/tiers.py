"""Tier state of a document folder: lookup of stored chunks, and waiting for writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvmosaic.cache.keys import Key
from kvmosaic.config import parse_bytes
from kvmosaic.console.cache.selection import CALL_SECONDS, SECRET_VARIABLE, claims_of, whole_entry
from kvmosaic.entries import Checksum, check_entry
from kvmosaic.entries.verification import NO_LABEL
from kvmosaic.errors import InvalidConfig, InvalidEntry
from kvmosaic.tiers import Deadline, Tier
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.peek import Peeking

if TYPE_CHECKING:
    from kvmosaic.console.warm.report import WarmingBar
    from kvmosaic.llm import LLM

_AT_ONCE = 256
_LOOK_SECONDS = 0.2


class StoredKeys:
    """The tiers of an engine as one store in which every tier must have every chunk."""

    def __init__(self, llm: LLM, seal: Checksum) -> None:
        """Raises InvalidConfig if a tier does not outlive this process."""
        assert llm.engine.offloader is not None, "an engine with a chunk cache and tiers has an offloader"
        self._tiered_store = llm.engine.offloader.tiered_store
        for tier in self._tiered_store.tiers:
            if not tier.is_persistent:
                raise InvalidConfig(f"what a {tier.name} tier has is gone with this process; leave it out")
        self._codecs = ("none", llm.tier_config.chunk_codec)
        self._seal = seal
        self._max_pending = parse_bytes(llm.tier_config.chunk_pending)

    @property
    def tiers(self) -> Sequence[Tier]:
        """All of them, the fastest first."""
        return self._tiered_store.tiers

    def find(self, keys: Collection[Key]) -> set[Key]:
        """Returns the keys of which every tier has a usable entry; entries that only some tiers have are copied.

        An entry that could not be used here (of another secret, or with numbers that are rounded more) is removed, so
        that the chunk can be stored again.

        Raises:
            InvalidConfig: there is a secret, and none was given. TierError: a tier fails.
        """
        found = [self._usable(tier, keys) for tier in self.tiers]
        for key in set().union(*found):
            self._copy(key, found)
        return set(keys).intersection(*found)

    def missing(self, keys: Collection[Key]) -> list[Key]:
        """Returns the keys missing in some tier, for any reason.

        Raises:
            TierError: a tier fails.
        """
        every = list(keys)
        missing: dict[Key, None] = {}
        for tier in self.tiers:
            for first in range(0, len(every), _AT_ONCE):
                some = every[first : first + _AT_ONCE]
                there = tier.exists_many(some, Deadline(CALL_SECONDS))
                missing.update((key, None) for key in some if key not in there)
        return list(missing)

    def wait_for_room(self, num_bytes: int) -> None:
        """Waits until `num_bytes` more may be computed without drops from a full write queue."""
        while self._tiered_store.pending_bytes + num_bytes > self._max_pending:
            if self._tiered_store.flush(_LOOK_SECONDS):
                return

    def wait(self, bar: WarmingBar) -> None:
        """Waits until all writes have succeeded or failed."""
        while not self._tiered_store.flush(_LOOK_SECONDS):
            bar.writing()

    def bytes_written(self) -> int:
        """Returns the bytes written by this process, in all tiers."""
        return sum(tier.stat().put_bytes for tier in self.tiers)

    def _usable(self, tier: Tier, keys: Collection[Key]) -> set[Key]:
        there = tier.exists_many(keys, Deadline(CALL_SECONDS))
        behind = tier.tier if isinstance(tier, Breaker) else tier
        if not isinstance(behind, Peeking):  # reading each entry in full would cost too much
            return there
        useless = {key for key in there if not self._is_usable(tier, key)}
        tier.delete_many(useless, Deadline(CALL_SECONDS))
        return there - useless

    def _is_usable(self, tier: Tier, key: Key) -> bool:
        try:
            claims = claims_of(tier, key)
        except InvalidEntry:
            return False
        if claims is None:
            return False
        if self._seal.label == NO_LABEL != claims.label:
            raise InvalidConfig(
                f"the {tier.name} tier has entries that are sealed with a secret, and {SECRET_VARIABLE} is not set; "
                "set it, or give another place"
            )
        return claims.header.key == key and claims.header.codec in self._codecs and claims.label == self._seal.label

    def _copy(self, key: Key, found: Sequence[set[Key]]) -> None:
        """Copies an entry to the tiers without it; a bad one is computed again."""
        if all(key in there for there in found):
            return
        for tier, there in zip(self.tiers, found, strict=True):
            if key not in there:
                continue
            try:
                if (entry := whole_entry(tier, key)) is None:
                    continue
                check_entry(entry, key, self._seal)
            except InvalidEntry:
                tier.delete_many([key], Deadline(CALL_SECONDS))
                there.discard(key)
                continue
            for other, lacking in zip(self.tiers, found, strict=True):
                if key not in lacking:
                    lacking |= other.put_many({key: entry}, Deadline(CALL_SECONDS))
            return
