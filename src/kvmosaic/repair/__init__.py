"""Repair: selective recomputation of tokens of cached chunks."""

from kvmosaic.repair.policy import (
    ASKED_REPAIR,
    DEFAULT_REPAIR,
    FEW_DOCUMENTS,
    FORMS,
    MANY_ASKED_REPAIR,
    MEASURED,
    Alike,
    AskedDocuments,
    ChunkSignals,
    Combined,
    FirstTokens,
    FullRepair,
    KeyDeviation,
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
from kvmosaic.repair.words import WordFinder
