"""Replies of a Redis server, validated before use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def integers(reply: object, count: int) -> list[int] | None:
    """A reply of `count` integers; None for anything else."""
    if isinstance(reply, list) and len(reply) == count and all(type(number) is int for number in reply):
        return reply
    return None


def items(reply: object, count: int) -> Sequence[Any]:
    """A reply of `count` items of any kind; `count` times None for anything else."""
    return reply if isinstance(reply, list) and len(reply) == count else [None] * count


def cursor_and_names(reply: object) -> tuple[bytes, list[bytes]]:
    """Result of a scan step; the end, and no names, for anything else."""
    cursor, names = items(reply, 2)
    if not isinstance(cursor, bytes) or not cursor.isdigit() or not isinstance(names, list):
        return b"0", []
    return cursor, [name if isinstance(name, bytes) else b"" for name in names]


def size_and_moment(reply: object) -> tuple[int, float]:
    """Bytes of an entry (-1: absent), and the microsecond of its last use (0.0: unknown)."""
    num_bytes, moment = items(reply, 2)
    try:
        micros = float(moment)
    except (TypeError, ValueError, OverflowError):
        micros = 0.0
    return num_bytes if type(num_bytes) is int else -1, micros if math.isfinite(micros) else 0.0
