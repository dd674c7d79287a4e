"""Repair: selective recomputation of tokens of cached chunks."""

from kvmosaic.repair.parser import DEFAULT_REPAIR, FORMS, repair_policy
from kvmosaic.repair.policy import (
    MEASURED,
    ChunkSignals,
    Combined,
    FirstTokens,
    FullRepair,
    KeyDeviation,
    NameFinder,
    Names,
    NoRepair,
    QueryAttention,
    RepairPolicy,
    Signal,
    Temperature,
    budget_of,
    checked_choice,
    highest_scored,
)
