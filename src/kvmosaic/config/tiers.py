"""Settings of the tiers: where chunks are offloaded, and how they are stored there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kvmosaic.config.setting import parse_bytes, setting, validate_settings
from kvmosaic.errors import InvalidConfig

MAX_TIERS = 8
MIN_SECRET_CHARACTERS, MAX_SECRET_CHARACTERS = 8, 1024

_tiers = partial(setting, panel="Tiers")
_size = partial(_tiers, max_length=32, metavar="SIZE", check=parse_bytes)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Where chunks are kept when the device has no room for them, and how."""

    chunk_tier: tuple[str | Any, ...] = _tiers(
        (),
        metavar="URL",
        is_secret=True,
        help="Where chunks are kept beyond the device: host:4GiB, disk:/var/cache/kvmosaic?quota=100GiB, redis://…; "
        "several may be given, the fastest first.",
    )
    chunk_codec: Literal["none", "int8"] = _tiers(
        "none", help="How numbers are stored there: as they are, or in eight bits, which changes answers a little."
    )
    chunk_secret: str | None = _tiers(
        None,
        is_secret=True,
        help="Without it an entry can be neither made nor changed; 8 to 1024 characters.",
    )
    chunk_pending: int | str = _size(
        "512MiB", help="Maximum memory for chunks queued for writing; more are not stored."
    )
    chunk_staged: int | str = _size("512MiB", help="Maximum memory for chunks prefetched for waiting requests.")
    chunk_loading: Literal["auto", "always"] = _tiers(
        "auto",
        help="Load a chunk where that is expected to be faster than computing it, or wherever a tier has it, which "
        "spares the processor and does not depend on how fast the machine is.",
    )

    def __post_init__(self) -> None:
        tiers = self.chunk_tier
        if isinstance(tiers, str) or not isinstance(tiers, tuple | list):
            raise InvalidConfig(
                f"chunk_tier must be a list such as ('host:4GiB', 'disk:/path?quota=100GiB'), got {tiers!r}"
            )
        if len(tiers) > MAX_TIERS:
            raise InvalidConfig(f"{len(tiers)} tiers are too many; give at most {MAX_TIERS}")
        object.__setattr__(self, "chunk_tier", tuple(tiers))
        validate_settings(self)
        secret = self.chunk_secret
        if secret is not None and not (isinstance(secret, str) and is_secret_text(secret)):
            given = f"{len(secret):,} characters" if isinstance(secret, str) else type(secret).__name__
            raise InvalidConfig(
                f"chunk_secret must be a text of 8 to 1024 characters, got {given}; leave it out to have none"
            )


def is_secret_text(secret: str) -> bool:
    """Whether a text can be the secret of tiers."""
    return MIN_SECRET_CHARACTERS <= len(secret) <= MAX_SECRET_CHARACTERS
