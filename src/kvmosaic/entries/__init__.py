"""Entries: serialized chunks, as tiers store them: header, checksum, payload and codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.entries.codec import choose_codec
    from kvmosaic.entries.entry import (
        DecodedEntry,
        EntryBound,
        EntryExpectation,
        decode_entry,
        encode_entry,
    )
    from kvmosaic.entries.header import CodecName, DtypeName, EntryHeader
    from kvmosaic.entries.verification import (
        Checksum,
        check_entry,
    )

# Names are imported on first use: headers are read without torch.
_HOMES = {
    "codec": ("choose_codec",),
    "entry": ("DecodedEntry", "EntryBound", "EntryExpectation", "decode_entry", "encode_entry"),
    "header": ("CodecName", "DtypeName", "EntryHeader"),
    "verification": (
        "Checksum",
        "check_entry",
    ),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
