"""Rotary position embeddings: detection of a model's rotation, and rotation of heads by a distance."""

from kvmosaic.rope.detect import (
    PROBE_POSITIONS,
    ROTATION_TOLERANCES,
    Detection,
    Heads,
    detect_rotation,
    of_equal_length,
    relative_error,
    turned_error,
)
from kvmosaic.rope.rotation import Rotation, RotationLayout, RotationTables, paired, rotate
from kvmosaic.rope.table_cache import TableCache

__all__ = [
    "PROBE_POSITIONS",
    "ROTATION_TOLERANCES",
    "Detection",
    "Heads",
    "Rotation",
    "RotationLayout",
    "RotationTables",
    "TableCache",
    "detect_rotation",
    "of_equal_length",
    "paired",
    "relative_error",
    "rotate",
    "turned_error",
]
