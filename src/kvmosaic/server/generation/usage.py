"""Usage: tokens read, reused, computed and generated, and the outcome for each segment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from kvmosaic.api.fields import Reply
from kvmosaic.engine import RequestDelta
from kvmosaic.sampling import ReuseReport, SegmentReuse
from kvmosaic.sampling.reuse import MissReason, RepairUse

_EXACT = ("system", "plain")
"""Segment kinds whose reuse is that of an exact prefix."""


class PromptTokensDetails(Reply):
    """Where the prompt's tokens came from; cached and recomputed ones add up to `prompt_tokens`."""

    cached_tokens: Annotated[int, Field(description="Read from the cache, in documents as well.")]
    composed_tokens: Annotated[
        int, Field(description="Of these, those in documents or after them; the others are an exact prefix.")
    ]
    recomputed_tokens: Annotated[int, Field(description="Computed for this request.")]


class Usage(Reply):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class SegmentReport(Reply):
    """What became of one segment."""

    kind: Literal["system", "chunk", "text", "question", "plain"]
    prompt_index: int = 0
    id: str | None = None
    name: str | None = None
    miss: Annotated[
        MissReason | None,
        Field(description="Documents that were computed, all or in part: why they were not in the cache."),
    ] = None
    tokens: int
    action: Literal["reused", "moved", "computed", "partly reused"]
    distance: Annotated[int, Field(description="Positions by which the question sees it moved.")] = 0
    tier: Annotated[
        str | None, Field(description="Where its keys and values were found: device, or a tier; null when computed.")
    ] = None
    reused_tokens: int
    ms: float
    note: str = ""


class RepairReport(Reply):
    """What was computed again of the documents, of all prompts of a request together."""

    policy: str
    document_tokens: Annotated[int, Field(description="Tokens of all documents.")]
    repaired_tokens: Annotated[int, Field(description="Of these, read as they are when they see the tokens before.")]
    computed_tokens: Annotated[int, Field(description="Of these, computed for this request; others were kept.")]
    fraction: Annotated[float, Field(description="Repaired tokens, by all tokens of documents.")]
    work_fraction: Annotated[
        float, Field(description="What choosing and repairing cost; 1 is what computing all documents once costs.")
    ]
    ms: float


class ReplyReport(Reply):
    """What the answer was made from; beside `usage` in every reply."""

    composition: Annotated[str, Field(description="'exact', or the approximation that the settings asked for.")]
    time_to_first_token_ms: float | None = None
    documents: list[SegmentReport]
    segments: list[SegmentReport]
    advice: Annotated[
        list[str],
        Field(
            default_factory=list, description="What to set or send, where reuse is lost again and again; usually empty."
        ),
    ]
    warnings: Annotated[
        list[str], Field(default_factory=list, description="What of the request was ignored or changed; usually empty.")
    ]
    repair: Annotated[RepairReport | None, Field(description="null: nothing was asked to be computed again.")] = None


class UsageTotals:
    """Sum over the deltas of one HTTP request: tokens of its prompts and answers, and their reuse."""

    def __init__(
        self,
        num_prompt_tokens: Sequence[int],
        document_ids: frozenset[str],
        warnings: Sequence[str] = (),
    ) -> None:
        """Creates a count from the tokens of each prompt, and names that are ids.

        `warnings` are about the body of the request.
        """
        self._warnings = warnings
        self._num_prompt_tokens = list(num_prompt_tokens)
        self._document_ids = document_ids
        self._reuse: dict[int, ReuseReport] = {}
        self.num_answer_tokens = 0

    def add(self, prompt_index: int, delta: RequestDelta) -> None:
        """Adds a delta."""
        self.num_answer_tokens += sum(len(answer.token_ids) for answer in delta.answers)
        if delta.reuse is not None:
            self._reuse[prompt_index] = delta.reuse

    def usage(self) -> Usage:
        """Returns the numbers so far; without details until the reuse is known."""
        num_prompt = sum(self._num_prompt_tokens)
        numbers = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self.num_answer_tokens,
            total_tokens=num_prompt + self.num_answer_tokens,
        )
        if len(self._reuse) < len(self._num_prompt_tokens):
            return numbers
        segments = [segment for reuse in self._reuse.values() for segment in reuse.segments]
        exact = sum(segment.reused_tokens for segment in segments if segment.kind in _EXACT)
        reused = sum(segment.reused_tokens for segment in segments)
        numbers.prompt_tokens_details = PromptTokensDetails(
            cached_tokens=reused, composed_tokens=reused - exact, recomputed_tokens=num_prompt - reused
        )
        return numbers

    def report(self) -> ReplyReport:
        """Returns the outcome for every segment of every prompt."""
        segments = [
            self._segment(index, segment) for index in sorted(self._reuse) for segment in self._reuse[index].segments
        ]
        compositions = dict.fromkeys(self._reuse[index].composition for index in sorted(self._reuse))
        known = (reuse.time_to_first_token for reuse in self._reuse.values())
        seconds = max((first for first in known if first is not None), default=None)
        return ReplyReport(
            composition=" | ".join(compositions) or "exact",
            time_to_first_token_ms=None if seconds is None else round(seconds * 1e3, 3),
            documents=[segment for segment in segments if segment.kind == "chunk"],
            segments=segments,
            advice=list(dict.fromkeys(said for index in sorted(self._reuse) for said in self._reuse[index].advice)),
            warnings=list(self._warnings),
            repair=_repair([reuse.repair for reuse in self._reuse.values() if reuse.repair is not None]),
        )

    def _segment(self, prompt_index: int, segment: SegmentReuse) -> SegmentReport:
        whole = re.sub(r" \(\d+/\d+\)\Z", "", segment.name or "")
        document_id = next((name for name in (segment.name, whole) if name in self._document_ids), None)
        return SegmentReport(**segment.to_reply(prompt_index, document_id))


def _repair(uses: Sequence[RepairUse]) -> RepairReport | None:
    """Sums the repair of all prompts of a request, which share one policy."""
    if not uses:
        return None
    document_tokens = sum(use.document_tokens for use in uses)
    repaired_tokens = sum(use.repaired_tokens for use in uses)
    work = sum(use.work_fraction * use.document_tokens for use in uses)
    return RepairReport(
        policy=uses[0].policy,
        document_tokens=document_tokens,
        repaired_tokens=repaired_tokens,
        computed_tokens=sum(use.computed_tokens for use in uses),
        fraction=round(repaired_tokens / max(document_tokens, 1), 6),
        work_fraction=round(work / max(document_tokens, 1), 6),
        ms=round(sum(use.milliseconds for use in uses), 3),
    )
