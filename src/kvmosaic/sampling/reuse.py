"""Reuse report: the cost of each segment of a prompt, and the savings by the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

MissReason = Literal[
    "never_seen", "evicted", "other_system_text", "other_companions", "changed_text", "white_space", "counter"
]
"""Why a document was not found in the cache.

never_seen          no request of this tenant brought it before, as far as is known
evicted             it was cached, and left the cache to make room
other_system_text   it is cached after another system text
other_companions    it is cached after other companions: as it is computed for another place in a prompt
changed_text        the document of this name had another text
white_space         a document was seen that differs in white space only
counter             a document was seen that differs in its numbers only
"""
SegmentAction = Literal["reused", "moved", "computed", "partly reused"]


@dataclass(frozen=True, slots=True)
class SegmentReuse:
    """Reuse of one segment."""

    kind: str
    """system, chunk, question or plain."""
    num_tokens: int
    action: SegmentAction
    """reused at its position, moved (reused at another position), computed, or reused up to some token."""
    name: str | None = None
    distance: int = 0
    """Positions by which it is moved for the question."""
    reused_tokens: int = 0
    num_blocks: int = 0
    milliseconds: float = 0.0
    """Computed, in whole or in part: its share, by tokens, of the steps it was in, which other requests may share.
    A cache hit: an equal share of the time to plan and allocate the whole prompt, since that is done at once."""
    note: str = ""
    """A remark for readers, for example an approximation."""
    tier: str | None = None
    """Source of its keys and values: "device", or the tier that it was loaded from; None if all was computed."""
    miss: MissReason | None = None
    """Documents that were computed, in whole or in part: why they were not in the cache."""

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return self.num_tokens - self.reused_tokens

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {**asdict(self), "computed_tokens": self.computed_tokens}

    def to_reply(self, prompt_index: int = 0, document_id: str | None = None) -> dict[str, Any]:
        """Names and values as in replies of the HTTP API."""
        return {
            "kind": self.kind,
            "prompt_index": prompt_index,
            "id": document_id,
            "name": self.name,
            "tokens": self.num_tokens,
            "action": self.action,
            "distance": self.distance,
            "tier": self.tier,
            "reused_tokens": self.reused_tokens,
            "ms": round(self.milliseconds, 3),
            "miss": self.miss,
            "note": self.note,
        }

    def __str__(self) -> str:
        label = f"{self.kind} {self.name!r}" if self.name else self.kind
        moved = f" by {self.distance:+d}" if self.distance and self.reused_tokens else ""
        partly = f" ({self.reused_tokens} of {self.num_tokens})" if 0 < self.reused_tokens < self.num_tokens else ""
        note = f"  ({self.note})" if self.note else ""
        action = f"{self.action}{moved}{partly}"
        return f"{label:<28.28} {self.num_tokens:>7} tokens  {action:<28} {self.milliseconds:>9.2f} ms{note}"


def segment_action(num_reused: int, num_tokens: int, distance: int) -> SegmentAction:
    """What became of a segment of which so many tokens were reused, at a position that much further on."""
    if num_reused == 0:
        return "computed"
    if num_reused < num_tokens:
        return "partly reused"
    return "moved" if distance else "reused"


@dataclass(frozen=True, slots=True)
class RepairUse:
    """Recomputed tokens of the documents, and the cost."""

    policy: str
    """The policy as text, such as "query(0.15)"."""
    document_tokens: int
    """Tokens of all documents of the prompt."""
    repaired_tokens: int
    """Document tokens whose keys and values were computed with everything before them visible."""
    computed_tokens: int
    """Repaired tokens that went through the model; the others were repaired for an earlier request and cached."""
    work_fraction: float
    """Layers computed for choosing and repairing tokens, relative to the layers of all document tokens: 1 is the cost
    of computing all documents once. A token counts once for each layer."""
    milliseconds: float
    """Time for choosing and repairing: its share, by tokens, of the steps it was in."""

    @property
    def fraction(self) -> float:
        """Repaired tokens relative to all document tokens."""
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
    """The cost of each segment of a prompt."""

    segments: tuple[SegmentReuse, ...] = ()
    time_to_first_token: float | None = None
    """Seconds from the arrival of the request to its first token."""
    composition: str = "exact"
    """"exact", or the approximation that the settings requested."""
    repair: RepairUse | None = None
    """Recomputed tokens of the documents, if requested."""
    advice: tuple[str, ...] = ()
    """What to set or send so that reuse is not lost again and again, if this request lost some."""

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
        """Reused tokens relative to all tokens; 0 for an empty report."""
        return self.reused_tokens / self.num_tokens if self.num_tokens else 0.0

    def renamed(self, rename: Callable[[str], str]) -> ReuseReport:
        """A copy in which every name of a segment is replaced by that of `rename`."""
        segments = (
            segment if segment.name is None else replace(segment, name=rename(segment.name))
            for segment in self.segments
        )
        return replace(self, segments=tuple(segments))

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
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        first = "" if self.time_to_first_token is None else f", first token after {self.time_to_first_token:.3f} s"
        summary = (
            f"{self.num_tokens} tokens: {self.reused_tokens} reused ({self.reused_fraction:.0%}; "
            f"{self.moved_tokens} of them moved), {self.computed_tokens} computed{first}; {self.composition}"
        )
        repair = [str(self.repair)] if self.repair else []
        return "\n".join([*map(str, self.segments), *repair, summary, *(f"lost reuse: {said}" for said in self.advice)])
