"""Pieces of keys, read in place and merged."""

from kvmosaic.attention.composed import Piece, composed_attention
from kvmosaic.attention.merge import merge_partials
from kvmosaic.attention.reads import Call, Mask, PoolName, ReadPlan, RowGroup, RunRead, plan_reads
from kvmosaic.attention.step import StepAttention, Write
from kvmosaic.attention.torch_backend import AttentionBackend, TorchBackend, attend_plain

__all__ = [
    "AttentionBackend",
    "Call",
    "Mask",
    "Piece",
    "PoolName",
    "ReadPlan",
    "RowGroup",
    "RunRead",
    "StepAttention",
    "TorchBackend",
    "Write",
    "attend_plain",
    "composed_attention",
    "merge_partials",
    "plan_reads",
]
