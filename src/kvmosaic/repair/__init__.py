"""Repair: selective recomputation of tokens of cached chunks."""

from kvmosaic.repair.parser import DEFAULT_REPAIR, FORMS, repair_policy
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
    budget_of,
    checked_choice,
    highest_scored,
)

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
