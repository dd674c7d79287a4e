"""Segments and prompts: what was asked, before anything has a position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvmosaic.errors import EmptySegment, InvalidPrompt


class SegmentKind(StrEnum):
    """The part a segment plays; it decides what the segment sees."""

    SYSTEM = "system"
    CHUNK = "chunk"
    QUESTION = "question"
    PLAIN = "plain"
    """The only segment of an ordinary prompt: causal, position 0, no documents."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens (or the text they will be made from) that is computed together.

    Exactly one of `text` and `token_ids` may be missing; a segment with token ids is ready for the layout.
    """

    kind: SegmentKind
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    name: str | None = None
    """What people call it: a document's id or title. Not part of the cache key."""
    sees: tuple[int, ...] = ()
    """Chunks only: numbers (from 0) of earlier chunks that this chunk sees besides the system prompt."""
    position_offset: int | None = None
    """Chunks only, strategy `absolute`: the position of the first token."""

    def __post_init__(self) -> None:
        if self.token_ids is None and self.text is None:
            raise EmptySegment(f"the {self.kind} segment has neither text nor token ids; give one of them")
        if self.token_ids is not None and len(self.token_ids) == 0:
            raise EmptySegment(f"the {self.label} has 0 tokens; a segment needs at least 1 (leave it out instead)")

    @property
    def label(self) -> str:
        """How messages and reports call this segment."""
        return f"{self.kind} {self.name!r}" if self.name else f"{self.kind} segment"

    @property
    def num_tokens(self) -> int:
        """Tokens of a tokenized segment."""
        assert self.token_ids is not None, "a segment is tokenized before it is placed"
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    """An ordered tuple of segments: `[system] chunk* question`, or one `plain` segment.

    salt: separates tenants; prompts with different salts never share a cached byte.
    """

    segments: tuple[Segment, ...]
    salt: str = ""

    def __post_init__(self) -> None:
        kinds = [segment.kind for segment in self.segments]
        if kinds == [SegmentKind.PLAIN]:
            return
        if not kinds or kinds[-1] is not SegmentKind.QUESTION:
            raise InvalidPrompt("a prompt ends with one question; got the segments " + (", ".join(kinds) or "(none)"))
        body = kinds[1:-1] if kinds[0] is SegmentKind.SYSTEM else kinds[:-1]
        if any(kind is not SegmentKind.CHUNK for kind in body):
            raise InvalidPrompt(
                "a prompt is an optional system segment, any number of chunks and one question; got " + ", ".join(kinds)
            )

    @property
    def chunks(self) -> tuple[Segment, ...]:
        """The documents, in prompt order."""
        return tuple(segment for segment in self.segments if segment.kind is SegmentKind.CHUNK)

    @property
    def is_plain(self) -> bool:
        """Whether this is an ordinary prompt without segments."""
        return len(self.segments) == 1 and self.segments[0].kind is SegmentKind.PLAIN

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(segment.num_tokens for segment in self.segments)

    @classmethod
    def from_tokens(
        cls,
        system: Sequence[int] | None = None,
        chunks: Iterable[Sequence[int]] = (),
        question: Sequence[int] | None = None,
        *,
        names: Sequence[str] | None = None,
        salt: str = "",
    ) -> Prompt:
        """Builds a prompt from token ids.

        Args:
            system: token ids of the system prompt; None leaves it out.
            chunks: one sequence of token ids per document.
            question: token ids of the question.
            names: one name per chunk, for reports, pins and deletion.
            salt: tenant salt.

        Raises:
            EmptySegment: a segment has no tokens.
            InvalidPrompt: no question, or a different number of names and chunks.
        """
        bodies = [tuple(chunk) for chunk in chunks]
        if names is not None and len(names) != len(bodies):
            raise InvalidPrompt(f"{len(names)} names for {len(bodies)} chunks; give one name per chunk or none")
        if question is None:
            raise InvalidPrompt("a prompt needs a question; pass question=[...] token ids")
        segments = [] if system is None else [Segment(SegmentKind.SYSTEM, tuple(system))]
        segments += [
            Segment(SegmentKind.CHUNK, body, name=names[index] if names else None) for index, body in enumerate(bodies)
        ]
        segments.append(Segment(SegmentKind.QUESTION, tuple(question)))
        return cls(tuple(segments), salt=salt)

    @classmethod
    def plain(cls, token_ids: Sequence[int], *, salt: str = "") -> Prompt:
        """An ordinary prompt: one causal segment at position 0."""
        return cls((Segment(SegmentKind.PLAIN, tuple(token_ids)),), salt=salt)
