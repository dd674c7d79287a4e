"""Selection of tier entries for a command: by name, model and last use."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvmosaic.console.cache.place import header_of
from kvmosaic.entries import EntryHeader
from kvmosaic.errors import InvalidConfig, InvalidEntry
from kvmosaic.tiers import EntryInfo, Tier

MAX_DAYS = 36_500
_FINGERPRINT = re.compile(r"[0-9a-fA-F]{4,64}")


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry with its header."""

    info: EntryInfo
    header: EntryHeader | None
    """None if unreadable, or not read."""
    problem: str = ""

    @property
    def last_used(self) -> float:
        """Unix seconds of the last use, or of creation where the tier does not record uses; else 0."""
        return self.info.last_used or (self.header.created if self.header else 0.0)


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions that must all hold; without any, every entry is selected."""

    name: str | None = None
    """Part of one of its names, ignoring case."""
    model: str | None = None
    """Prefix of the fingerprint."""
    not_model: str | None = None
    older_than_days: float | None = None
    """Minimum days since the last use."""

    def __post_init__(self) -> None:
        for option, value in (("--model", self.model), ("--not-model", self.not_model)):
            if value is not None and not _FINGERPRINT.fullmatch(value):
                raise InvalidConfig(
                    f"{option} is {value[:100]!r}; give 4 or more digits of a fingerprint, as 'kvmosaic cache ls' "
                    "shows it"
                )
        if self.model is not None and self.not_model is not None:
            raise InvalidConfig("--model and --not-model exclude each other; leave one out")
        if self.name is not None and not self.name.strip():
            raise InvalidConfig("--name is empty; give a part of a name, or leave it out")
        days = self.older_than_days
        if days is not None and not 0 <= days <= MAX_DAYS:
            raise InvalidConfig(f"--older-than is {days:g}; give 0 to {MAX_DAYS} days")

    @property
    def is_empty(self) -> bool:
        """Whether there is no condition."""
        return self == Selection()

    @property
    def asks_headers(self) -> bool:
        """Whether the conditions need headers."""
        return any(value is not None for value in (self.name, self.model, self.not_model))

    def takes(self, entry: Listed, now: float) -> bool:
        """Whether an entry is selected. An unreadable one is selected only if no condition needs its header."""
        if self.older_than_days is not None and entry.last_used > now - self.older_than_days * 86_400:
            return False
        if not self.asks_headers:
            return True
        if (header := entry.header) is None:
            return False
        if self.name is not None and not any(self.name.lower() in name.lower() for name in header.names):
            return False
        if self.model is not None and not header.fingerprint.startswith(self.model.lower()):
            return False
        return self.not_model is None or not header.fingerprint.startswith(self.not_model.lower())

    def select(self, tier: Tier, infos: Iterable[EntryInfo]) -> Iterator[Listed]:
        """Yields the selected entries; reads headers only if needed."""
        now = time.time()
        for info in infos:
            asks = self.asks_headers or (self.older_than_days is not None and not info.last_used)
            entry = listed(tier, info) if asks else Listed(info, None)
            if entry is not None and self.takes(entry, now):
                yield entry


def listed(tier: Tier, info: EntryInfo) -> Listed | None:
    """Returns an entry with its header; None if it is gone.

    Raises:
        TierUnavailable: the tier fails.
    """
    try:
        header = header_of(tier, info.key)
    except InvalidEntry as error:
        return Listed(info, None, str(error))
    return None if header is None else Listed(info, header)
