"""Lossless compression with zstd, where it pays."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from kvmosaic.errors import DamagedEntry, ForeignEntry, InvalidConfig
from kvmosaic.memory.buffer import memory_of, view_of

LEVEL = 1
"""Level 3 makes real keys and values 1% to 2% smaller and takes a quarter longer."""
MIN_GAIN = 0.05
"""Part of the bytes that must be saved, else they are kept as they are."""
_SAMPLES = 8
_SAMPLE_BYTES = 2**15


def squeezed(payload: Tensor) -> Tensor | None:
    """[m] uint8: one zstd frame of the payload [n] uint8; None where that saves less than `MIN_GAIN`.

    A few samples are tried first, so that bytes which cannot be compressed cost next to nothing.

    Raises:
        InvalidConfig: zstandard is not installed.
    """
    library = _zstandard()
    if library is None:
        raise InvalidConfig("compression is 'zstd' and zstandard is not installed; pip install 'kvmosaic[tiers]'")
    compressor = library.ZstdCompressor(level=LEVEL, write_checksum=False, write_content_size=True)
    for part in (_samples(payload), payload):
        data = memory_of(part)
        frame = compressor.compress(data)
        if len(frame) > len(data) * (1 - MIN_GAIN):
            return None
    return view_of(frame)


def expanded(frame: Tensor, num_bytes: int) -> Tensor:
    """[num_bytes] uint8 again; never makes more than that.

    Raises:
        DamagedEntry: no frame of exactly so many bytes.
        ForeignEntry: zstandard is not installed.
    """
    library = _zstandard()
    if library is None:
        raise ForeignEntry(
            "the entry is compressed with zstd and zstandard is not installed; pip install 'kvmosaic[tiers]'"
        )
    data = memory_of(frame)
    try:
        says = library.frame_content_size(data)
        if says != num_bytes:
            raise DamagedEntry(
                f"the entry holds a zstd frame of {says} bytes, expected {num_bytes}; it is left out and computed again"
            )
        result = library.ZstdDecompressor(max_window_size=2**27).decompress(data, allow_extra_data=False)
    except library.ZstdError as error:
        raise DamagedEntry(
            f"the entry holds a zstd frame that cannot be read ({error}); it is left out and computed again"
        ) from error
    return view_of(result)


def _samples(payload: Tensor) -> Tensor:
    if len(payload) <= 2 * _SAMPLES * _SAMPLE_BYTES:
        return payload
    starts = np.linspace(0, len(payload) - _SAMPLE_BYTES, _SAMPLES).astype(np.int64).tolist()
    return torch.cat([payload[start : start + _SAMPLE_BYTES] for start in starts])


def _zstandard() -> ModuleType | None:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard
