"""Quick measurement of this machine: multiplications, memory, and tiers."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from kvmosaic.cache.keys import Key
from kvmosaic.capacity.speed import Speed
from kvmosaic.capacity.tier_plan import TierSpeed
from kvmosaic.errors import TierUnavailable
from kvmosaic.memory.storage import device_memory_bytes
from kvmosaic.model.transformers_loading import dtype_on
from kvmosaic.tiers import Deadline, DiskTier, Tier, open_tier, parse_tier_url
from kvmosaic.tiers.url import TierSpec

MEASURED_SHARE = 0.7
"""Share of square matrix products that the layers of a prompt reach; see docs/capacity.md."""
_READ_BYTES = 2**28
_SMALL_BYTES, _LARGE_BYTES = 2**16, 2**25
_TRIES = 5
_SECONDS = 20.0
"""Timeout of one call to a tier."""


def measure_speed(dtype: str, *, tries: int = _TRIES) -> Speed:
    """Measures this machine: on CUDA if torch finds it, else on the CPU with torch's own number of threads.

    The best of several tries counts, because other work only makes them slower.
    """
    device = _device()
    flops = measure_flops(getattr(torch, dtype), tries, device, size=8_192 if device.type == "cuda" else 1_024)
    buffer = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
    rate = _READ_BYTES / least_seconds(_finished(buffer.sum, device), tries)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"this CPU, {torch.get_num_threads()} threads"
    return Speed(flops, rate, "").times(MEASURED_SHARE, f"{name}: {MEASURED_SHARE:.0%} of what was measured")


def dtype_here(stored: str) -> str:
    """Returns the dtype that `load_model` chooses on this machine for a checkpoint in `stored`."""
    return str(dtype_on(_device(), getattr(torch, stored))).removeprefix("torch.")


def memory_here() -> int:
    """Bytes of memory of this machine's device, as the engine counts it."""
    return device_memory_bytes(_device())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure_flops(dtype: torch.dtype, tries: int, device: torch.device | None = None, size: int = 1_024) -> float:
    """Floating point operations per second of a square product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / least_seconds(_finished(lambda: left @ right, left.device), tries)


def least_seconds(run: Callable[[], object], tries: int) -> float:
    """The shortest of several runs, after one that does not count."""
    run()
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure_tier(url: str) -> TierSpeed:
    """Latency and bandwidth of a tier: entries are put, read and checked, and removed.

    A disk is measured in a folder of its own beside the tier's, and only from the page cache: a disk that has to be
    read is slower. Redis and object stores are asked where they are, so up to 32 MiB of entries may be evicted to make
    room.

    Raises:
        InvalidConfig: an invalid URL, or a package that is missing.
        TierUnavailable: the tier fails, or takes longer than 20 s.
    """
    spec = parse_tier_url(url)
    if spec.kind != "disk":
        quota = spec.quota_bytes
        spec = TierSpec("host", "", 2 * _LARGE_BYTES) if spec.kind == "host" else spec
        return _measured(open_tier(spec), spec.kind, quota)
    parent = next(folder for folder in (Path(spec.address), *Path(spec.address).absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".kvmosaic-measure-", dir=_beside(parent)) as folder:
            return _measured(DiskTier(folder, 2 * _LARGE_BYTES, durable=False), "disk", spec.quota_bytes)
    except OSError as error:
        raise TierUnavailable(f"nothing can be written beside {spec.address}: {error.strerror}") from error


def _beside(folder: Path) -> Path:
    """Returns a folder on the same disk where other files do no harm."""
    return folder.parent if (folder / ".kvmosaic-tier.json").exists() else folder


def _measured(tier: Tier, kind: str, quota_bytes: int | None) -> TierSpeed:
    try:
        small, large = (_entry_seconds(tier, size) for size in (_SMALL_BYTES, _LARGE_BYTES))
    finally:
        tier.close()
    rate = (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-9)
    how = "measured, files in the page cache" if kind == "disk" else "measured"
    return TierSpeed(kind, small, rate, how, quota_bytes)


def _entry_seconds(tier: Tier, num_bytes: int) -> float:
    """To read an entry, look at its checksum and copy it."""
    key, entry = Key(secrets.token_bytes(32)), secrets.token_bytes(num_bytes)

    def read() -> None:
        found = tier.get_many([key], Deadline(_SECONDS)).get(key)
        if found is None:
            raise TierUnavailable(f"the {tier.name} tier did not give an entry of {num_bytes:,} bytes back in time")
        blake3(found).digest()
        np.frombuffer(found, np.uint8).copy()

    try:
        if key not in tier.put_many({key: entry}, Deadline(_SECONDS)):
            raise TierUnavailable(f"the {tier.name} tier did not take an entry of {num_bytes:,} bytes in time")
        return least_seconds(read, _TRIES)
    finally:
        tier.delete_many([key], Deadline(_SECONDS))


def _finished(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same, until the device is done."""

    def finish() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return finish
