"""Sizes in bytes, as numbers or text such as "2GiB"."""

from __future__ import annotations

import re

from kvmosaic.errors import InvalidConfig

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_BYTES = 2**50


def parse_bytes(size: int | str) -> int:
    """Reads a size: a whole number of bytes, or text such as "2GiB", "512 MB" or "1.5G" (K, M, G, T: powers of 1024).

    Raises:
        InvalidConfig: not a size, not positive, or above 1 PiB.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
        if match is None or match[2].upper() not in _UNITS:
            raise InvalidConfig(
                f"{size[:99]!r} is not a size; write a number of bytes, or for example '2GiB' or '512MB'"
            )
        number = min(float(match[1]), float(_MAX_BYTES + 1))
        size = int(number * _UNITS[match[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= _MAX_BYTES:
        raise InvalidConfig(f"a size must be a whole number of bytes between 1 and 2**50 (1 PiB), got {size!r}")
    return size


def parse_optional_bytes(size: int | str | None) -> int:
    """Reads a size, or None, 0 and "0" as 0.

    Raises:
        InvalidConfig: see `parse_bytes`.
    """
    if size is None or (size == 0 and not isinstance(size, bool)) or (isinstance(size, str) and size.strip() == "0"):
        return 0
    return parse_bytes(size)
