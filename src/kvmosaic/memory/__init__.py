"""Where bytes live."""

from kvmosaic.memory.budget import blocks_within, check_fits, device_memory_bytes
from kvmosaic.memory.codec import choose_codec
from kvmosaic.memory.entry import DecodedEntry, EntryExpectation, decode_entry, encode_entry, read_header
from kvmosaic.memory.geometry import LayerGeometry, geometry_of
from kvmosaic.memory.header import CodecName, Compression, DtypeName, EntryHeader
from kvmosaic.memory.preamble import num_preamble_bytes
from kvmosaic.memory.storage import BlockStorage, ChunkTensors, StoredLayer

__all__ = [
    "BlockStorage",
    "ChunkTensors",
    "CodecName",
    "Compression",
    "DecodedEntry",
    "DtypeName",
    "EntryExpectation",
    "EntryHeader",
    "LayerGeometry",
    "StoredLayer",
    "blocks_within",
    "check_fits",
    "choose_codec",
    "decode_entry",
    "device_memory_bytes",
    "encode_entry",
    "geometry_of",
    "num_preamble_bytes",
    "read_header",
]
