"""Traces: recorded requests whose texts are blocks known by an id and a length only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

TraceFormat = Literal["ragpulse", "mooncake"]

BLOCK_TOKENS = 512
"""Tokens of a full block, in both formats."""


class TraceBlock(NamedTuple):
    """A block of text: equal ids are equal texts."""

    id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, in the order of its prompt: system text, documents, then everything else.

    A trace that does not tell documents from other text has it all in `rest`.
    """

    seconds: float
    """Since the beginning of the trace."""
    system: tuple[TraceBlock, ...]
    documents: tuple[TraceBlock, ...]
    """One block each."""
    rest: tuple[TraceBlock, ...]
    """History, results of a web search, and the question."""

    @property
    def num_document_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(block.num_tokens for block in self.documents)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(block.num_tokens for part in (self.system, self.documents, self.rest) for block in part)


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded trace, in the order of its timestamps."""

    name: str
    format: TraceFormat
    requests: tuple[TraceRequest, ...]

    @property
    def has_documents(self) -> bool:
        """Whether any request tells its documents from other text."""
        return any(request.documents for request in self.requests)

    @property
    def distinct_document_tokens(self) -> int:
        """Tokens of all documents, each counted once."""
        return _distinct_tokens(block for request in self.requests for block in request.documents)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all blocks, each counted once."""
        parts = ((request.system, request.documents, request.rest) for request in self.requests)
        return _distinct_tokens(block for three in parts for part in three for block in part)

    def first(self, count: int | None) -> Trace:
        """The first requests of the trace; None: all."""
        return self if count is None else Trace(self.name, self.format, self.requests[:count])

    def facts(self) -> dict[str, Any]:
        """Numbers for reports."""
        return {
            "name": self.name,
            "format": self.format,
            "requests": len(self.requests),
            "prompt_tokens": sum(request.num_tokens for request in self.requests),
            "document_tokens": sum(request.num_document_tokens for request in self.requests),
            "distinct_document_tokens": self.distinct_document_tokens,
            "distinct_documents": len({block.id for request in self.requests for block in request.documents}),
            "distinct_system_texts": len({tuple(block.id for block in each.system) for each in self.requests}),
        }


def _distinct_tokens(blocks: Any) -> int:
    return sum({block.id: block.num_tokens for block in blocks}.values())
