"""Prompts: segments from text, chat messages, documents or tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.prompt.document import Document, read_documents
    from kvmosaic.prompt.encoder import PromptEncoder
    from kvmosaic.prompt.message import read_messages
    from kvmosaic.prompt.segment import DocumentsOrder, Prompt, Segment, SegmentKind, seen_chunks
    from kvmosaic.prompt.separator import escape_separator
    from kvmosaic.prompt.settings import PromptSettings, check_length, check_token_ids
    from kvmosaic.prompt.tokenizer import Tokenizer

# Names are imported on first use: settings read limits of prompts, and the help of the commands needs no more.
_HOMES = {
    "document": ("Document", "read_documents"),
    "encoder": ("PromptEncoder",),
    "message": ("read_messages",),
    "segment": ("DocumentsOrder", "Prompt", "Segment", "SegmentKind", "seen_chunks"),
    "separator": ("escape_separator",),
    "settings": ("PromptSettings", "check_length", "check_token_ids"),
    "tokenizer": ("Tokenizer",),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
