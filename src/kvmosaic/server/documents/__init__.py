"""Documents as resources: stored texts that prompts name, and where their keys and values are."""

from kvmosaic.server.documents.names import shown_name
from kvmosaic.server.documents.shelf import DocumentPage
from kvmosaic.server.documents.store import DocumentStore, StoreLimits, StoreUsage
from kvmosaic.server.documents.stored import Draft, Match, StoredDocument, StoredText

__all__ = [
    "DocumentPage",
    "DocumentStore",
    "Draft",
    "Match",
    "StoreLimits",
    "StoreUsage",
    "StoredDocument",
    "StoredText",
    "shown_name",
]
