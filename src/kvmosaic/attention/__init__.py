"""Attention over pieces of cached keys, read in place and merged exactly."""

from kvmosaic.attention.backend_choice import BackendName, ChosenBackend, choose_backend
from kvmosaic.attention.composed import KVPiece, composed_attention
from kvmosaic.attention.merge import merge_partials
from kvmosaic.attention.native import NativeBackend
from kvmosaic.attention.paged import PagedPlan, paged_attention, plan_paged_attention
from kvmosaic.attention.reads import (
    ORDINARY_ROWS,
    AttentionObserver,
    Call,
    Piece,
    PoolName,
    ReadPlan,
    RowGroup,
    RowRules,
    plan_reads,
)
from kvmosaic.attention.rolling import BlockKVCache, sink_distance
from kvmosaic.attention.step import StepAttention, Write
from kvmosaic.attention.torch_backend import AttentionBackend, LayerBackend, PlanReader, TorchBackend, attend_plain

__all__ = [
    "ORDINARY_ROWS",
    "AttentionBackend",
    "AttentionObserver",
    "BackendName",
    "BlockKVCache",
    "Call",
    "ChosenBackend",
    "KVPiece",
    "LayerBackend",
    "NativeBackend",
    "PagedPlan",
    "Piece",
    "PlanReader",
    "PoolName",
    "ReadPlan",
    "RowGroup",
    "RowRules",
    "StepAttention",
    "TorchBackend",
    "Write",
    "attend_plain",
    "choose_backend",
    "composed_attention",
    "merge_partials",
    "paged_attention",
    "plan_paged_attention",
    "plan_reads",
    "sink_distance",
]
