"""Composed prompts in vLLM's form: one list of token ids, the boundaries of its segments, and how it is composed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

from kvmosaic.errors import InvalidConfig, InvalidPrompt, InvalidRepair
from kvmosaic.integrations.vllm.contract import (
    MAX_REPAIR_TOKENS,
    Composition,
    Saw,
    check_choice,
    choices,
    choose_strategy,
)
from kvmosaic.prompt import Prompt, SegmentKind
from kvmosaic.repair import FirstTokens, NoRepair, repair_policy

FIELDS = ("position_strategy", "chunk_context", "repair")


@dataclass(frozen=True, slots=True)
class How:
    """Composition options of one request, or a server's defaults for options that a request omits."""

    position_strategy: str = "auto"
    chunk_context: Saw = "system"
    repair: int | None = None
    """Tokens at the start of each document that are recomputed with everything before them visible; None: the engine's
    default repair, where it can."""

    def __post_init__(self) -> None:
        check_choice("position_strategy", self.position_strategy, choices())
        check_choice("chunk_context", self.chunk_context, get_args(Saw))

    def updated(self, fields: Mapping[str, Any]) -> How:
        """A copy with the fields that are present and not None.

        Raises:
            InvalidConfig: an invalid value.
        """
        given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
        if "repair" in given:
            given["repair"] = read_repair(given["repair"])
        return replace(self, **given)


def read_repair(value: object) -> int:
    """Parses "none", "first(16)" or {"first": 16} into the number of recomputed tokens.

    Raises:
        InvalidConfig: anything else.
    """
    said = f"first({value['first']})" if isinstance(value, Mapping) and set(value) == {"first"} else value
    with suppress(InvalidRepair):
        policy = repair_policy(said)  # type: ignore[arg-type]
        if isinstance(policy, NoRepair):
            return 0
        if isinstance(policy, FirstTokens) and policy.tokens <= MAX_REPAIR_TOKENS:
            return policy.tokens
    raise InvalidConfig(
        f'repair is {value!r:.80}; write "none", or "first(16)" for the first 16 tokens of each document, at most '
        f"{MAX_REPAIR_TOKENS}"
    )


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
        texts=_texts(prompt),
    )
    return EncodedRequest(token_ids, composition)


def _texts(prompt: Prompt) -> tuple[int, ...]:
    """Tokens of the texts before each chunk; those after the last one belong to the question, which sees the same."""
    if not prompt.has_texts:
        return ()
    lengths, length = [], 0
    for segment in prompt.segments:
        if segment.kind is SegmentKind.TEXT:
            length += segment.num_tokens
        elif segment.kind is SegmentKind.CHUNK:
            lengths.append(length)
            length = 0
    return tuple(lengths) if any(lengths) else ()
