"""Attention over pieces of cached keys, read in place and merged exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.attention.interface import (
    ORDINARY_ROWS,
    AttentionObserver,
    BackendName,
    ChosenBackend,
    Piece,
    PoolName,
    RowGroup,
    RowRules,
    RowStates,
    SpanRows,
)
from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.attention.backend_choice import choose_backend
    from kvmosaic.attention.composed import KVPiece, composed_attention, merge_partials
    from kvmosaic.attention.native import NativeBackend
    from kvmosaic.attention.paged import PagedPlan, paged_attention, plan_paged_attention
    from kvmosaic.attention.reads import Call, ReadPlan, plan_reads
    from kvmosaic.attention.rolling import BlockKVCache, sink_distance
    from kvmosaic.attention.step import StepAttention, Write
    from kvmosaic.attention.torch_backend import AttentionBackend, LayerBackend, PlanReader, TorchBackend, attend_plain

# Names are imported on first use: an engine that has its own attention needs no torch.
_HOMES = {
    "backend_choice": ("choose_backend",),
    "composed": ("KVPiece", "composed_attention", "merge_partials"),
    "native": ("NativeBackend",),
    "paged": ("PagedPlan", "paged_attention", "plan_paged_attention"),
    "reads": ("Call", "ReadPlan", "plan_reads"),
    "rolling": ("BlockKVCache", "sink_distance"),
    "step": ("StepAttention", "Write"),
    "torch_backend": ("AttentionBackend", "LayerBackend", "PlanReader", "TorchBackend", "attend_plain"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
