"""Repair: selective recomputation of tokens of cached chunks."""

from kvmosaic.repair.choosing import budget_of, checked_choice, highest_scored
from kvmosaic.repair.default import DEFAULT_REPAIR
from kvmosaic.repair.policy import (
    ChunkSignals,
    Combined,
    FirstTokens,
    FullRepair,
    KeyDeviation,
    NoRepair,
    QueryAttention,
    RepairPolicy,
    Signal,
    Temperature,
)
from kvmosaic.repair.reading import FORMS, repair_policy

__all__ = [
    "DEFAULT_REPAIR",
    "FORMS",
    "ChunkSignals",
    "Combined",
    "FirstTokens",
    "FullRepair",
    "KeyDeviation",
    "NoRepair",
    "QueryAttention",
    "RepairPolicy",
    "Signal",
    "Temperature",
    "budget_of",
    "checked_choice",
    "highest_scored",
    "repair_policy",
]
