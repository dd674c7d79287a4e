"""Repair: selective recomputation of tokens of cached chunks."""

from kvmosaic.repair.policy import (
    ASKED_REPAIR,
    DEFAULT_REPAIR,
    FORMS,
    MEASURED,
    Alike,
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
    budget_of,
    checked_choice,
    highest_scored,
    repair_policy,
)
