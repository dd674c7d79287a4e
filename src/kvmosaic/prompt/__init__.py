"""Prompts: segments from text, chat messages, documents or tokens."""

from kvmosaic.prompt.document import Document, read_documents
from kvmosaic.prompt.encoder import PromptEncoder
from kvmosaic.prompt.message import read_messages
from kvmosaic.prompt.segment import Prompt, Segment, SegmentKind, seen_chunks
from kvmosaic.prompt.separator import escape_separator
from kvmosaic.prompt.settings import PromptOptions, PromptSettings, check_length, check_token_ids
from kvmosaic.prompt.tokenizer import Tokenizer

__all__ = [
    "Document",
    "Prompt",
    "PromptEncoder",
    "PromptOptions",
    "PromptSettings",
    "Segment",
    "SegmentKind",
    "Tokenizer",
    "check_length",
    "check_token_ids",
    "escape_separator",
    "read_documents",
    "read_messages",
    "seen_chunks",
]
