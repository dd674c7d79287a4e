"""Stored documents: texts that prompts name by an id, with versions, times to live and limits."""

from __future__ import annotations

from kvmosaic.documents.database import document_place
from kvmosaic.documents.store import DocumentPage, DocumentStore, Order
from kvmosaic.documents.stored import (
    DocumentDraft,
    Match,
    StoredDocument,
    StoredText,
    StoreLimits,
    StoreUsage,
    label_in,
    shown_name,
)
