"""File names of a disk tier."""

from __future__ import annotations

import re
import secrets
from functools import cache
from hashlib import sha256
from pathlib import Path

from kvmosaic.cache.keys import Key
from kvmosaic.tiers.tier import MAX_KEY_BYTES

MARKER = ".kvmosaic-tier.json"
"""The marker file, with the version. Hidden, so that `rm -r folder/*` empties the tier and no more."""
QUARANTINE = "quarantine"
SHARDS = tuple(f"{first:02x}" for first in range(256))
"""The folders of entries: the first byte of their key in hex."""

_HEX = f"(?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}}"
_ENTRY = re.compile(rf"({_HEX})\.safetensors")
_DRAFT = re.compile(rf"\.(?:{_HEX}|kvmosaic-tier)(?:\.([0-9a-f]{{16}}))?\.[0-9a-f]{{16}}\.partial")
_ASIDE = re.compile(rf"{_HEX}\.([0-9a-f]{{16}})\.safetensors")


def shard_of(key: Key) -> str:
    """The shard (folder) of an entry."""
    return key[:1].hex()


def entry_name(key: Key) -> str:
    """The file name of an entry; hexadecimal digits only, for any key."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, got {len(key)}")
    return f"{key.hex()}.safetensors"


def key_of(name: str, shard: str) -> Key | None:
    """The key of the entry in this file; None for other files: of another shard, or not ours."""
    match = _ENTRY.fullmatch(name)
    return Key(bytes.fromhex(match[1])) if match is not None and match[1].startswith(shard) else None


def draft_name(subject: str, host: str = "") -> str:
    """A unique name for a file in progress; `host` as returned by `this_host`."""
    return f".{subject}.{host}{'.' if host else ''}{secrets.token_hex(8)}.partial"


def host_of(name: str) -> str:
    """The host that writes, or wrote, a draft; empty if its name does not say."""
    match = _DRAFT.fullmatch(name)
    return "" if match is None or match[1] is None else match[1]


@cache
def this_host() -> str:
    """16 hexadecimal digits shared by all processes under this kernel until reboot, and by no others.

    Empty where the system does not provide it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return ""
    return sha256(boot).hexdigest()[:16]


def is_draft(name: str) -> bool:
    """Whether a file is a draft, in progress or stale."""
    return _DRAFT.fullmatch(name) is not None


def aside_name(key: Key, moment: int) -> str:
    """The file name of an entry in quarantine; `moment` in nanoseconds."""
    return f"{key.hex()}.{moment:016x}.safetensors"


def moment_of(name: str) -> str | None:
    """When a file entered quarantine, as text that sorts; None for files that are not ours."""
    match = _ASIDE.fullmatch(name)
    return None if match is None else match[1]


def is_ours(name: str) -> bool:
    """Whether a name at the top of a folder can be ours."""
    return name in SHARDS or name in (MARKER, QUARANTINE) or is_draft(name)
