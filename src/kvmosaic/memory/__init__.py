"""KV memory: block storage, budget, and serialized entries."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmosaic.memory.budget import blocks_within, check_fits, device_memory_bytes
    from kvmosaic.memory.checksum import Checksum
    from kvmosaic.memory.claimed_header import (
        ClaimedHeader,
        check_entry,
        num_claimed_bytes,
        num_file_header_bytes,
        read_claimed_header,
    )
    from kvmosaic.memory.codec import choose_codec
    from kvmosaic.memory.entry import (
        DecodedEntry,
        EntryBound,
        EntryExpectation,
        decode_entry,
        encode_entry,
        read_header,
    )
    from kvmosaic.memory.header import CodecName, Compression, DtypeName, EntryHeader
    from kvmosaic.memory.storage import BlockStorage, ChunkTensors

__all__ = [
    "BlockStorage",
    "Checksum",
    "ChunkTensors",
    "ClaimedHeader",
    "CodecName",
    "Compression",
    "DecodedEntry",
    "DtypeName",
    "EntryBound",
    "EntryExpectation",
    "EntryHeader",
    "blocks_within",
    "check_entry",
    "check_fits",
    "choose_codec",
    "decode_entry",
    "device_memory_bytes",
    "encode_entry",
    "num_claimed_bytes",
    "num_file_header_bytes",
    "read_claimed_header",
    "read_header",
]

# Names are imported on first use, so that commands which look at stored entries stay without torch.
_HOMES = {
    "budget": ("blocks_within", "check_fits", "device_memory_bytes"),
    "checksum": ("Checksum",),
    "claimed_header": (
        "ClaimedHeader",
        "check_entry",
        "num_claimed_bytes",
        "num_file_header_bytes",
        "read_claimed_header",
    ),
    "codec": ("choose_codec",),
    "entry": (
        "DecodedEntry",
        "EntryBound",
        "EntryExpectation",
        "decode_entry",
        "encode_entry",
        "read_header",
    ),
    "header": ("CodecName", "Compression", "DtypeName", "EntryHeader"),
    "storage": ("BlockStorage", "ChunkTensors"),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'kvmosaic.memory' has no attribute {name!r}")
    return getattr(import_module(f"kvmosaic.memory.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
