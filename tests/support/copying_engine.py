"""A second engine, as small as one can be: spans are stored apart, and copied and rotated to where they are read.

It shares no code with our engine but the layouts, and shows that the protocol asks for nothing that needs blocks, steps
with several requests, or queries rotated instead of keys. Engines that can only copy and shift keys look like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from kvmosaic.engine.priorities import check_priority
from kvmosaic.errors import EngineStopped, InvalidPrompt, KVMosaicError, NotMovable, UnknownRequest
from kvmosaic.layers import AttentionCall
from kvmosaic.layout import ChunkContext, Layout, Span, arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, SegmentKind, check_length
from kvmosaic.rope import rotate
from kvmosaic.sampling import (
    Answer,
    RequestOutput,
    ReuseReport,
    SamplingParams,
    SamplingState,
    SegmentReuse,
    sample,
)
from support.inference_engine import Capability, EngineCapabilities

_MISSING = {
    Capability.ROLLING_WINDOW: "it keeps every token",
    Capability.REPAIR: "it computes a span as a whole",
    Capability.STRUCTURED_OUTPUT: "it has no grammar compiler",
}


@dataclass
class Stored:
    """Keys and values of consecutive tokens, by layer."""

    start: int
    layers: list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class CopyingRequest:
    """A prompt, its layout, and its answers; the first of them computes the prompt."""

    request_id: str
    prompt: Prompt
    layout: Layout
    params: SamplingParams
    answers: list[tuple[Answer, SamplingState]] = field(default_factory=list)
    read: list[tuple[Stored, int]] = field(default_factory=list)
    """What the question sees, each at a distance."""
    computed: list[Stored] = field(default_factory=list)
    """By answer: its question and what follows."""
    reuse: ReuseReport = field(default_factory=ReuseReport)
    is_finished: bool = False
    error: KVMosaicError | None = None

    def output(self) -> RequestOutput:
        token_ids = tuple(token for segment in self.prompt.segments for token in segment.token_ids or ())
        answers = tuple(answer.output() for answer, _ in self.answers)
        return RequestOutput(self.request_id, None, token_ids, answers, self.is_finished, self.reuse)


class CopyingEngine:
    """Runs one request after the other, token by token."""

    def __init__(self, model: LoadedModel, strategy: str = "shared", context: ChunkContext = "system") -> None:
        immovable = {} if model.is_movable else {Capability.MOVE_KEYS: model.immovable_reason}
        self.capabilities = EngineCapabilities(
            "copying", model.vocab_size, model.max_positions, {**_MISSING, **immovable}
        )
        self._model = model
        self._strategy, self._context = strategy, context
        self._stored: dict[Any, Stored] = {}
        self._requests: dict[str, CopyingRequest] = {}
        self._names = count()
        self._is_closed = False

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def arrange(
        self, prompt: Prompt, position_strategy: str | None = None, chunk_context: ChunkContext | None = None
    ) -> Layout:
        layout = arrange(prompt, position_strategy or self._strategy, chunk_context or self._context)
        if layout.is_moved:
            self.capabilities.require(Capability.MOVE_KEYS, f"position_strategy={layout.strategy!r}")
        if self._model.max_positions is not None:
            check_length(layout.last.end, self._model.max_positions, 1)
        return layout

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
    ) -> CopyingRequest:
        self.capabilities.check(params)
        layout = self.arrange(prompt, position_strategy, chunk_context)
        return self._add(CopyingRequest(self._checked_id(request_id, priority), prompt, layout, params))

    def add_warm_up(self, prompt: Prompt, *, chunk_context: ChunkContext | None = None) -> CopyingRequest:
        if not prompt.chunks:
            raise InvalidPrompt("a warm-up needs at least one document; got none")
        kept = (segment for segment in prompt.segments if segment.kind is not SegmentKind.TEXT)
        layout = self.arrange(replace(prompt, segments=tuple(kept)), None, chunk_context)
        shorter = replace(layout, spans=layout.spans[:-1])
        return self._add(CopyingRequest(self._checked_id(None, 0), prompt, shorter, SamplingParams(max_tokens=1)))

    def step(self) -> Sequence[CopyingRequest]:
        if not self._requests:
            return []
        request = next(iter(self._requests.values()))
        if not request.answers:
            self._prefill(request)
        else:
            self._decode(request)
        if all(answer.finish is not None for answer, _ in request.answers):
            self._end(request)
        return [request]

    def abort(self, request_id: str) -> None:
        if request_id not in self._requests:
            raise UnknownRequest(f"no request {request_id!r} is under way; it may have finished already")
        request = self._requests[request_id]
        for answer, _ in request.answers:
            if answer.finish is None:
                answer.end("abort")
        self._end(request)

    def close(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        self._is_closed = True

    def _checked_id(self, request_id: str | None, priority: int) -> str:
        if self._is_closed:
            raise EngineStopped("the engine is closed")
        check_priority(priority)
        if request_id in self._requests:
            raise InvalidPrompt(f"a request {request_id!r} is under way already; choose another request_id")
        return request_id or f"request-{next(self._names)}"

    def _add(self, request: CopyingRequest) -> CopyingRequest:
        self._requests[request.request_id] = request
        return request

    def _end(self, request: CopyingRequest) -> None:
        self._requests.pop(request.request_id, None)
        request.is_finished = True

    def _prefill(self, request: CopyingRequest) -> None:
        """Computes the spans that are not stored, then the question; forks what it computed."""
        layout, keys, parts, was_stored = request.layout, list[Any](), list[Stored](), list[bool]()
        is_warm_up = layout.last.segment.kind is SegmentKind.CHUNK
        for span in layout.spans:
            seen = tuple((keys[view.span], view.distance) for view in span.views)
            keys.append((request.prompt.tenant, request.prompt.salt, span.token_ids, span.start, seen))
            is_kept = is_warm_up or span is not layout.last
            stored = self._stored.get(keys[-1]) if is_kept else None
            was_stored.append(stored is not None)
            if stored is None:
                stored, logits = self._compute(span.token_ids, span.start, None, self._reads(span, parts))
            if is_kept:
                self._stored[keys[-1]] = stored
            parts.append(stored)
        request.reuse = _report(layout, was_stored)
        request.read = self._reads(layout.last, parts)
        if is_warm_up:
            return
        for index in range(request.params.n):
            answer = Answer(request.params, self._model.tokenizer, self._model.eos_token_ids, index=index)
            state = SamplingState(request.params, vocab_size=self._model.vocab_size, index=index)
            request.answers.append((answer, state))
            request.computed.append(Stored(parts[-1].start, list(parts[-1].layers)))
        for (answer, state), row in zip(request.answers, logits.expand(request.params.n, -1), strict=True):
            answer.append(sample(row[None], [state])[0])

    def _decode(self, request: CopyingRequest) -> None:
        for (answer, state), own in zip(request.answers, request.computed, strict=True):
            if answer.finish is None:
                position = own.start + len(own.layers[0][0])
                _, logits = self._compute(answer.token_ids[-1:], position, own, request.read)
                answer.append(sample(logits, [state])[0])

    def _reads(self, span: Span, parts: Sequence[Stored]) -> list[tuple[Stored, int]]:
        return [(parts[view.span], view.distance) for view in span.views]

    def _compute(
        self, token_ids: Sequence[int], position: int, own: Stored | None, reads: Sequence[tuple[Stored, int]]
    ) -> tuple[Stored, Tensor]:
        """Keys and values of tokens that continue `own` and see `reads`, and the logits [1, V] of the last one."""
        own = own or Stored(position, [])
        positions = torch.arange(position, position + len(token_ids))

        def attend(call: AttentionCall) -> Tensor:
            layer = self._model.layers[call.layer_index]
            if call.layer_index == len(own.layers):
                own.layers.append((call.key, call.value))
            else:
                known = own.layers[call.layer_index]
                own.layers[call.layer_index] = tuple(map(torch.cat, zip(known, (call.key, call.value), strict=True)))
            keys, values, places = [], [], []
            for stored, distance in [*reads, (own, 0)]:
                key, value = stored.layers[call.layer_index]
                if distance and layer.rotation is not None:
                    distances = torch.full((len(key),), distance)
                    key = rotate(key, layer.rotation.tables(distances, dtype=key.dtype, device=key.device))
                elif distance and not layer.is_movable:
                    raise NotMovable(layer.immovable_reason)
                keys.append(key)
                values.append(value)
                places.append(torch.arange(len(key)) + stored.start + distance)
            return _attention(call, layer, positions, torch.cat(keys), torch.cat(values), torch.cat(places))

        rows = torch.tensor([len(token_ids) - 1])
        logits = self._model.forward(torch.tensor(list(token_ids)), positions, rows, attend)
        return own, logits


def _attention(
    call: AttentionCall, layer: Any, positions: Tensor, key: Tensor, value: Tensor, places: Tensor
) -> Tensor:
    """[T, H, Dv]: the last T keys are the rows' own, and causal."""
    groups, count = call.query.shape[1] // key.shape[1], len(positions)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", call.query, key) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if layer.bias is not None:
        scores = scores + layer.bias.between(positions, places[None].expand(count, -1), scores.dtype)
    shown = torch.ones(count, len(places), dtype=torch.bool).tril(len(places) - count)
    shown &= places[None] >= torch.tensor([layer.mask.lowest_seen(place) for place in positions.tolist()])[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~shown, -torch.inf).softmax(-1), value)


def _report(layout: Layout, was_stored: Sequence[bool]) -> ReuseReport:
    segments = (
        SegmentReuse(
            str(span.segment.kind),
            span.num_tokens,
            "reused" if found else "computed",
            reused_tokens=found * span.num_tokens,
        )
        for span, found in zip(layout.spans, was_stored, strict=True)
    )
    return ReuseReport(tuple(segments))
