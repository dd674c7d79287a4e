"""Stored documents: texts that prompts name by an id, with versions, times to live and limits."""

from __future__ import annotations

from kvmosaic.documents.backend import DocumentBackend
from kvmosaic.documents.folder import FolderDocuments
from kvmosaic.documents.memory import DocumentPage, MemoryDocuments, Order
from kvmosaic.documents.names import label_in, shown_name
from kvmosaic.documents.store import DocumentStore, StoreLimits, StoreUsage
from kvmosaic.documents.stored import DocumentDraft, Match, StoredDocument, StoredText

__all__ = [
    "DocumentBackend",
    "DocumentDraft",
    "DocumentPage",
    "DocumentStore",
    "FolderDocuments",
    "Match",
    "MemoryDocuments",
    "Order",
    "StoreLimits",
    "StoreUsage",
    "StoredDocument",
    "StoredText",
    "label_in",
    "shown_name",
]
