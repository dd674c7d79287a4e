"""Reuse reports: what each segment of a prompt cost, and what the cache saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

SegmentAction = Literal["reused", "moved", "computed", "partly reused"]


@dataclass(frozen=True, slots=True)
class SegmentReuse:
    """What happened to one segment."""

    kind: str
    """system, chunk, question or plain."""
    num_tokens: int
    action: SegmentAction
    """reused where it was computed, moved (reused at another position), computed, or reused up to some token."""
    name: str | None = None
    distance: int = 0
    """Positions by which the question sees it moved."""
    reused_tokens: int = 0
    num_blocks: int = 0
    milliseconds: float = 0.0
    """Computed, in whole or in part: its share, by tokens, of the steps it was in, which other requests may share.
    Found in the cache: an equal share of the time to plan and allocate the whole prompt, since that is done at once."""
    note: str = ""
    """What a reader should know, for example an approximation."""
    tier: str | None = None
    """Where its keys and values were found: "device", or the tier that it was loaded from; None if all was computed."""

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return self.num_tokens - self.reused_tokens

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {**asdict(self), "computed_tokens": self.computed_tokens}

    def __str__(self) -> str:
        label = f"{self.kind} {self.name!r}" if self.name else self.kind
        moved = f" by {self.distance:+d}" if self.distance else ""
        partly = f" ({self.reused_tokens} of {self.num_tokens})" if 0 < self.reused_tokens < self.num_tokens else ""
        note = f"  ({self.note})" if self.note else ""
        action = f"{self.action}{moved}{partly}"
        return f"{label:<28.28} {self.num_tokens:>7} tokens  {action:<28} {self.milliseconds:>9.2f} ms{note}"


@dataclass(frozen=True, slots=True)
class RepairUse:
    """What was computed again of the documents, and what that cost."""

    policy: str
    """Its text, such as "query(0.15)"."""
    document_tokens: int
    """Tokens of all documents of the prompt."""
    repaired_tokens: int
    """Of these, those that the answer reads as they are when they see what stands before them."""
    computed_tokens: int
    """Of these, those that went through the model; the others were repaired for an earlier request and kept."""
    work_fraction: float
    """Layers computed for choosing and repairing tokens, by the layers of all document tokens: 1 is what computing all
    documents once costs. A token counts once for each layer."""
    milliseconds: float
    """Spent on choosing and repairing, of the steps it was in by its share of their tokens."""

    @property
    def fraction(self) -> float:
        """Repaired tokens by all tokens of documents."""
        return self.repaired_tokens / self.document_tokens if self.document_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {**asdict(self), "fraction": self.fraction}

    def __str__(self) -> str:
        return (
            f"{self.policy}: {self.repaired_tokens} of {self.document_tokens} document tokens repaired "
            f"({self.fraction:.1%}), {self.computed_tokens} of them computed for this, {self.milliseconds:.2f} ms"
        )


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What each segment of a prompt cost."""

    segments: tuple[SegmentReuse, ...] = ()
    time_to_first_token: float | None = None
    """Seconds from the arrival of the request to its first token."""
    composition: str = "exact"
    """"exact", or the approximation that the settings asked for."""
    repair: RepairUse | None = None
    """What was computed again of the documents, if that was asked for."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def reused_tokens(self) -> int:
        """Tokens whose keys and values came from the cache, moved or not."""
        return sum(segment.reused_tokens for segment in self.segments)

    @property
    def moved_tokens(self) -> int:
        """Reused tokens that the question sees at another position than the one they were computed at."""
        return sum(segment.reused_tokens for segment in self.segments if segment.distance)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return sum(segment.computed_tokens for segment in self.segments)

    @property
    def reused_fraction(self) -> float:
        """Reused tokens by all tokens; 0 for an empty report."""
        return self.reused_tokens / self.num_tokens if self.num_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {
            "segments": [segment.to_dict() for segment in self.segments],
            "num_tokens": self.num_tokens,
            "reused_tokens": self.reused_tokens,
            "moved_tokens": self.moved_tokens,
            "computed_tokens": self.computed_tokens,
            "time_to_first_token": self.time_to_first_token,
            "composition": self.composition,
            "repair": self.repair.to_dict() if self.repair else None,
        }

    def __str__(self) -> str:
        first = "" if self.time_to_first_token is None else f", first token after {self.time_to_first_token:.3f} s"
        summary = (
            f"{self.num_tokens} tokens: {self.reused_tokens} reused ({self.reused_fraction:.0%}; "
            f"{self.moved_tokens} of them moved), {self.computed_tokens} computed{first}; {self.composition}"
        )
        return "\n".join([*map(str, self.segments), *([str(self.repair)] if self.repair else []), summary])
