"""Reuse report of one composed request inside vLLM, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvmosaic.integrations.vllm.contract import Composition

Source = Literal["cached", "computed", "awaited", "same"]

_NOTES: dict[Source, str] = {
    "cached": "",
    "computed": "",
    "awaited": "computed by another request",
    "same": "same document as another one here",
}


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """Source of a chunk's keys and values."""

    source: Source
    """cached: a cache hit. computed: for this request. awaited: computed for another request, which this one waited
    for. same: the same document occurs earlier in the prompt."""
    tier: str = "device"
    """For cache hits: "device", or the tier that they were loaded from."""
    seconds: float = 0.0
    """Time from the lookup until they were available."""


@dataclass(frozen=True, slots=True)
class ComposedReport:
    """Outcome of the segments of one request.

        token ids    s s s s s s s s | a a a a | b b b b b b | q q q q
                     └─ prefix_tokens ─┘   more than the system text if vLLM still has parts of the composed prompt

    All values are numbers, texts or None, so that any process can send it to any other.
    """

    composition: Composition
    num_tokens: int
    """Tokens of the whole prompt."""
    chunks: tuple[ChunkOutcome, ...] = ()
    """One per chunk; empty if the request was not composed."""
    prefix_tokens: int = 0
    """Tokens at the start of the prompt that hit vLLM's own prefix cache."""
    bypass: str = ""
    """Why it was answered as an ordinary prompt; empty: it was composed."""

    def __post_init__(self) -> None:
        if self.is_composed:
            assert len(self.chunks) == len(self.composition.chunks)

    @property
    def is_composed(self) -> bool:
        """Whether the prompt was composed from chunks; if not, it was an ordinary prompt."""
        return not self.bypass and bool(self.chunks)

    @property
    def repaired_tokens(self) -> int:
        """Tokens of chunks that were recomputed in this prompt."""
        shape = self.composition
        if not self.is_composed or not shape.repair:
            return 0
        ends = (start + length for start, length in zip(shape.starts, shape.chunks, strict=True))
        return sum(shape.repaired(chunk) for chunk, end in enumerate(ends) if self.prefix_tokens < end)

    def to_json(self) -> dict[str, Any]:
        """The value of the answer's field `kvmosaic`: that of our own server, plus `totals` and `bypass`."""
        segments = self.segments()
        reused = sum(segment["reused_tokens"] for segment in segments)
        exact = reused
        if self.is_composed:
            exact = sum(segment["reused_tokens"] for segment in segments if segment["kind"] == "system")
        return {
            "composition": self._meaning(),
            "time_to_first_token_ms": None,  # unknown to the scheduler, which builds this
            "documents": [segment for segment in segments if segment["kind"] == "chunk"],
            "segments": segments,
            "totals": {
                "prompt_tokens": self.num_tokens,
                "cached_tokens": exact,
                "composed_tokens": reused - exact,
                "recomputed_tokens": self.num_tokens - reused,
                "moved_tokens": sum(segment["reused_tokens"] for segment in segments if segment["distance"]),
            },
            "repair": None,  # repaired tokens are among the recomputed tokens; their time is unknown here
            "bypass": self.bypass or None,
        }

    def segments(self) -> list[dict[str, Any]]:
        """System text, chunks and question, in prompt order; an empty system text is omitted."""
        shape = self.composition
        rows = [_row("system", shape.system, self._system_reused())] if shape.system else []
        for index, start in enumerate(shape.starts):
            rows.append(self._chunk(index, start))
        question = self.num_tokens - shape.end
        rows.append(_row("question", question, self._of_prefix(shape.end, question)))
        return rows

    def _of_prefix(self, start: int, length: int) -> int:
        """How many of `length` tokens from `start` on hit the prefix cache."""
        return min(max(self.prefix_tokens - start, 0), length)

    def _system_reused(self) -> int:
        """All of it if a cached chunk saw it; else the prefix cache hits."""
        system = self.composition.system
        saw_it = self.is_composed and self.composition.chunk_context == "system"
        if saw_it and any(chunk.source == "cached" for chunk in self.chunks):
            return system
        return self._of_prefix(0, system)

    def _chunk(self, index: int, start: int) -> dict[str, Any]:
        shape = self.composition
        length = shape.chunks[index]
        name = shape.ids[index] if shape.ids else None
        of_prefix = self._of_prefix(start, length)
        if not self.is_composed:
            return _row("chunk", length, of_prefix, name=name)
        position = shape.position_at(start)
        distance = position - (shape.system if shape.chunk_context == "system" else 0)
        if of_prefix == length:
            return _row("chunk", length, length, name=name, distance=distance, note="composed here before")
        outcome = self.chunks[index]
        again = shape.repaired(index)
        is_loaded = outcome.source == "cached" and outcome.tier != "device"
        notes = (
            _NOTES[outcome.source],
            f"loaded from {outcome.tier}" if is_loaded else "",
            f"its first {again} tokens computed again" if again else "",
        )
        return _row(
            *("chunk", length, of_prefix if outcome.source == "computed" else max(of_prefix, length - again)),
            name=name,
            distance=distance,
            tier=outcome.tier if is_loaded else "device",
            seconds=outcome.seconds,
            note="; ".join(filter(None, notes)),
        )

    def _meaning(self) -> str:
        """Describes what the prompt computed: exact attention, or which approximation."""
        if not self.is_composed:
            return "exact"
        shape = self.composition
        parts = ["documents do not see each other"]
        if shape.chunk_context == "none":
            parts.append("documents did not see the system prompt")
        meaning = [f"composed ({shape.position_strategy}): " + ", ".join(parts)]
        if shape.repair:
            meaning.append(f"the first {shape.repair} tokens of each document see everything before them")
        return "; ".join(meaning)


def _row(
    kind: str,
    length: int,
    reused: int,
    *,
    name: str | None = None,
    distance: int = 0,
    tier: str = "device",
    seconds: float = 0.0,
    note: str = "",
) -> dict[str, Any]:
    whole = "moved" if distance else "reused"
    return {
        "kind": kind,
        "prompt_index": 0,
        "id": name,
        "name": name,
        "tokens": length,
        "action": "computed" if reused == 0 else whole if reused == length else "partly reused",
        "distance": distance,
        "tier": tier if reused else None,
        "reused_tokens": reused,
        "ms": round(seconds * 1e3, 3),
        "note": note,
    }
