"""Composed prompts in vLLM's form: one list of token ids and the boundaries of its segments."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.errors import InvalidPrompt
from kvmosaic.integrations.vllm.contract import Composition, choose_strategy
from kvmosaic.integrations.vllm.front.settings import How
from kvmosaic.prompt import Prompt, SegmentKind


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A prompt that is ready for vLLM."""

    token_ids: tuple[int, ...]
    composition: Composition | None
    """None: an ordinary prompt."""


def composed(prompt: Prompt, how: How, trained_positions: int | None) -> EncodedRequest:
    """Flattens a tokenized prompt; a strategy left to the engine is chosen here.

    Raises:
        InvalidPrompt: a document that sees others, or has its own position, which vLLM cannot compose.
        InvalidConfig: values beyond the contract's limits.
    """
    token_ids = tuple(token for segment in prompt.segments for token in segment.token_ids or ())
    chunks = prompt.chunks
    if not chunks:
        return EncodedRequest(token_ids, None)
    for chunk in chunks:
        if chunk.sees or chunk.position_offset is not None:
            field = "sees" if chunk.sees else "position_offset"
            raise InvalidPrompt(f"the {chunk.label} has {field}, which vLLM cannot compose; leave it out")
    first = prompt.segments[0]
    names = tuple(chunk.name for chunk in chunks)
    composition = Composition(
        system=first.num_tokens if first.kind is SegmentKind.SYSTEM else 0,
        chunks=tuple(chunk.num_tokens for chunk in chunks),
        position_strategy=choose_strategy(how.position_strategy, len(token_ids), trained_positions),
        chunk_context=how.chunk_context,
        repair=how.repair or 0,
        ids=names if any(names) else (),
        leaves_repair_open=how.repair is None,
    )
    return EncodedRequest(token_ids, composition)
