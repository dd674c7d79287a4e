"""Memory budget: the number of blocks that fit."""

from __future__ import annotations

import os

import torch

from kvmosaic.errors import InvalidConfig

MAX_BLOCKS = 1 << 24
"""Maximum blocks of one pool: their bookkeeping takes 335 MB before anything is cached. Measured up to ten million."""


def blocks_within(num_bytes: int, bytes_per_block: int, purpose: str) -> int:
    """Number of blocks that fit into a budget.

    Raises:
        InvalidConfig: not even one block fits, or more than `MAX_BLOCKS`.
    """
    count = num_bytes // max(bytes_per_block, 1)
    if count < 1:
        raise InvalidConfig(
            f"{purpose} is {num_bytes} bytes, but one block of this model takes {bytes_per_block} bytes; "
            f"give it at least {bytes_per_block} bytes or use a smaller block_size"
        )
    if count > MAX_BLOCKS:
        raise InvalidConfig(
            f"{purpose} is {num_bytes} bytes, which is {count} blocks of {bytes_per_block} bytes, and a pool has "
            f"{MAX_BLOCKS} at most; give it at most {MAX_BLOCKS * bytes_per_block} bytes or use a larger block_size"
        )
    return count


def check_fits(num_bytes: int, device: torch.device) -> None:
    """Rejects caches larger than the device.

    A system that overcommits memory would allocate them, and kill the process when they fill.

    Raises:
        InvalidConfig: `num_bytes` exceeds the total memory of the device.
    """
    total = device_memory_bytes(device)
    if num_bytes > total:
        raise InvalidConfig(
            f"the chunk cache and the request cache are to take {num_bytes / 2**30:.1f} GiB, but {device} has "
            f"{total / 2**30:.1f} GiB in all, and the model needs some of it; make the caches smaller"
        )


def device_memory_bytes(device: torch.device) -> int:
    """Total memory of a device: of the GPU, or of the machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
