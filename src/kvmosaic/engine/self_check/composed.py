"""Composed prompts: compares attention over cached pieces with dense attention, per layer and in the logits.

    attention      every attention output of one prompt, cold, warm and in decode, against dense attention over
                   the queries, keys and values that the layers computed; and every key and value stored, bit by bit
    logits         of several prompts, cold and warm, against one dense forward

A small engine answers them; it keeps its steps, and which token each row is.

The effect of rounding is measured where a difference is not tiny: dense attention is computed a second time from
queries that are off by one rounding, and the dense forward with attention outputs that are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvmosaic.attention import AttentionBackend, SpanRows
from kvmosaic.attention.dense import DenseAttention
from kvmosaic.attention.step import Choice
from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine.engine import Engine
from kvmosaic.engine.engine_core import EngineCore
from kvmosaic.engine.request import Request
from kvmosaic.engine.self_check import Comparison, worst_finding
from kvmosaic.engine.self_check.choices import Choices
from kvmosaic.engine.step import ScheduledTokens
from kvmosaic.layers import AttentionCall
from kvmosaic.layout import ChunkContext, DenseLayout, Layout, arrange, dense
from kvmosaic.model.hook import Receiver
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.runner import Batch, Runner
from kvmosaic.model.states import LayerState, Mixer, StateLayer
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.sampling import Array, SamplingParams

_MAX_NOISE_RATIO = 8.0
"""Max difference, as a multiple of what one rounding of the queries (or of the outputs) makes."""
_FLOORS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4, torch.float64: 1e-7}
"""Differences of one attention output that are allowed even where the noise is smaller, in root mean squares."""
_LOGIT_FLOORS = {torch.bfloat16: 5e-2, torch.float16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-5}
"""The same for logits, in standard deviations."""
_MAX_LOGIT_LIMIT = 1.0
"""Upper limit, whatever the noise: logits of unrelated prompts differ by 1.4."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """A prompt that was answered cold and warm."""

    layout: Layout
    """With the answer's tokens appended to the question."""
    requests: tuple[Request, Request]
    logits: Tensor
    """[2 * NUM_ANSWER, V], cold and warm."""


def check_composed(model: LoadedModel, prompts: Sequence[Prompt], backend: AttentionBackend | None) -> list[Comparison]:
    """Findings on positions, on storage, attention and chosen keys (of the first prompt), and on logits."""
    # context-free documents in sequence are moved furthest, and one dense forward still is their reference
    strategy = "sequential" if moves(model) else "shared"
    context: ChunkContext = "none" if moves(model) else "system"
    engine = RecordingEngine(model, backend, strategy, context)
    cold, warm = engine.answer(prompts), engine.answer(prompts)
    steps = engine.runner.steps
    answered = [
        _Answered(
            arrange(_with_answer(prompt, pair[0]), strategy, context),
            pair,
            torch.cat([step.logits_of(request) for request in pair for step in steps]),
        )
        for prompt, pair in zip(prompts, zip(cold, warm, strict=True), strict=True)
    ]
    return [
        _check_positions(answered, steps),
        *_check_attention(model, answered[0], steps),
        _check_logits(model, answered),
    ]


def moves(model: LoadedModel) -> bool:
    """Whether documents of the checked prompts are moved.

    Masks that are cut at fixed positions differ for a moved document, so that no single forward is a reference for it.
    """
    return model.is_movable and all(layer.mask.kind != "chunked" for layer in model.layers)


def _with_answer(prompt: Prompt, request: Request) -> Prompt:
    """The prompt, its question extended by the answer's tokens whose logits were recorded."""
    question = prompt.segments[-1]
    token_ids = (*(question.token_ids or ()), *request.output().outputs[0].token_ids[:-1])
    return replace(prompt, segments=(*prompt.segments[:-1], Segment(SegmentKind.QUESTION, token_ids)))


def _check_positions(answered: Sequence[_Answered], steps: Sequence[RecordedStep]) -> Comparison:
    misplaced = 0
    for each in answered:
        positions = torch.from_numpy(dense(each.layout).positions)
        for request in each.requests:
            for step in steps:
                rows, tokens = _rows_of(each.layout, request, step)
                misplaced += int((step.positions.cpu()[rows] != positions[tokens]).sum())
    return Comparison("positions", "the layout", float(misplaced), 0.0)


@dataclass(slots=True)
class _LayerRows:
    """Inputs and outputs of one layer's attention for a request, over all its steps."""

    call: AttentionCall
    """One of them: the layer's constants are the same in all."""
    keys: Tensor
    """[T, G, D], of all tokens of the prompt, as computed last; 0 where not computed yet."""
    values: Tensor
    tokens: list[int] = field(default_factory=list)
    """Numbers of the tokens of the queries."""
    queries: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)
    """Which tokens their queries may read: of an indexer the answer, of attention a part of the call."""

    def add(self, call: AttentionCall, output: Any, rows: Sequence[int], tokens: Sequence[int], seen: Tensor) -> None:
        """Adds the rows of one step, which are of these tokens and see what `seen` [T, T] says."""
        self.keys[tokens], self.values[tokens] = call.key[rows], call.value[rows]
        self.tokens += tokens
        self.queries.append(call.query[rows])
        choice = output if call.num_chosen else call.chosen
        reads_all = choice is None or not choice.masks
        self.chosen.append(seen[tokens] if reads_all else _chosen_tokens(choice, seen[tokens], rows))
        if not call.num_chosen:
            self.outputs.append(output[rows])


def _chosen_tokens(choice: Choice, seen: Tensor, rows: Sequence[int]) -> Tensor:
    """[R, T] bool: the tokens that rows have chosen, whose choice lists what they see [R, T] in order."""
    chosen = torch.zeros_like(seen)
    for number, row in enumerate(rows):
        group = next(group for group in choice.by_rows if row in group)
        visible = seen[number].nonzero()[:, 0]
        chosen[number, visible] = choice.by_rows[group][row - group.start, : len(visible)].to(seen.device)
    return chosen


def _check_attention(model: LoadedModel, answered: _Answered, steps: Sequence[RecordedStep]) -> list[Comparison]:
    layout = dense(answered.layout)
    attention, seen, choices = DenseAttention(layout, model.layers), torch.from_numpy(layout.mask), Choices()
    stored = [finding for step in steps for finding in _check_storage(model, step)]
    attended: list[Comparison] = []
    layers: dict[int, _LayerRows] = {}
    for request in answered.requests:
        # cache hits of the second request were computed by the first one; the rest is recomputed and rounds differently
        layers = {
            index: _LayerRows(layer.call, layer.keys.clone(), layer.values.clone()) for index, layer in layers.items()
        }
        for step in steps:
            rows, tokens = _rows_of(answered.layout, request, step)
            for call, output in step.calls if rows else ():
                if call.layer_index not in layers:
                    shape = (answered.layout.num_tokens, *call.key.shape[1:])
                    values = call.value.new_zeros(answered.layout.num_tokens, *call.value.shape[1:])
                    layers[call.layer_index] = _LayerRows(call, call.key.new_zeros(shape), values)
                layers[call.layer_index].add(call, output, rows, tokens, seen)
        for layer in layers.values():
            if layer.call.num_chosen:
                weights = layer.values[layer.tokens]
                scores = attention.index_scores(layer.call, torch.cat(layer.queries), layer.keys, weights, layer.tokens)
                chosen = torch.cat(layer.chosen).to(scores.device)
                choices.compare(layer.call, scores, chosen, is_ours=True)
            else:
                attended.append(_compare_attention(attention, layer))
    return [worst_finding(stored), worst_finding(attended), *choices.worst()]


def _check_storage(model: LoadedModel, step: RecordedStep) -> list[Comparison]:
    findings = []
    for call, _ in step.calls:
        key, value = step.stored[call.layer_index]
        if model.layers[call.layer_index].is_stored:
            pairs = [(key, call.key)] if call.num_chosen else [(key, call.key), (value, call.value)]
            differing = sum(int((mine != theirs).sum()) for mine, theirs in pairs)
            place = f"layer {call.layer_index}"
            findings.append(Comparison("what is stored", "what was computed", float(differing), 0.0, place))
    return findings


def _rows_of(layout: Layout, request: Request, step: RecordedStep) -> tuple[list[int], list[int]]:
    """Rows of a step that belong to a request, and the numbers of their tokens in its prompt."""
    offsets = np.cumsum([0] + [span.num_tokens for span in layout.spans])
    rows: list[int] = []
    tokens: list[int] = []
    last = 0
    for work in step.works:
        if work.sequence.request is request:
            first = int(offsets[work.span]) + work.first
            rows.extend(range(last, last + work.num_tokens))
            tokens.extend(range(first, first + work.num_tokens))
        last += work.num_tokens
    return rows, tokens


def _compare_attention(attention: DenseAttention, layer: _LayerRows) -> Comparison:
    """The row with the largest difference relative to its limit, in root mean squares of its output."""
    query, output = torch.cat(layer.queries), torch.cat(layer.outputs)
    call = replace(layer.call, chosen=torch.cat(layer.chosen))
    dense_output = attention.attend(call, query, layer.keys, layer.values, layer.tokens)
    size = dense_output.square().mean(dim=(1, 2)).sqrt().clamp_min(1e-30)
    apart = (output - dense_output).square().mean(dim=(1, 2)).sqrt() / size
    allowed = torch.full_like(apart, _FLOORS[query.dtype])
    if not bool((apart <= allowed).all()):
        unsure = _off_by_rounding(query, query.dtype)
        rounded = attention.attend(call, unsure, layer.keys, layer.values, layer.tokens)
        allowed += _MAX_NOISE_RATIO * (rounded - dense_output).square().mean(dim=(1, 2)).sqrt() / size
    row = int((apart / allowed).nan_to_num(math.inf).argmax())
    place = f"layer {layer.call.layer_index}"
    return Comparison("composed attention", "dense attention", float(apart[row]), float(allowed[row]), place)


def _check_logits(model: LoadedModel, answered: Sequence[_Answered]) -> Comparison:
    """Compares the median row, cold and warm: one row may be ill-conditioned, and one token choose another expert."""
    layouts = [_one_forward(each.layout) for each in answered]
    joined = _side_by_side(layouts)
    mixer = DenseStates([each.layout for each in answered]) if model.state_layers else None
    ends = np.cumsum([len(layout.token_ids) for layout in layouts])
    rows = [int(end) - NUM_ANSWER + number for end in ends for number in range(NUM_ANSWER)]
    attention = DenseAttention(joined, model.layers)
    theirs = _dense_logits(model, joined, rows, attention, mixer).double()
    floor = _LOGIT_FLOORS[model.dtype]
    finding = _compare_logits(answered, theirs, torch.full((len(theirs),), floor, dtype=theirs.dtype))
    if finding.passed:
        return finding

    def attend(call: AttentionCall) -> Tensor:
        if call.num_chosen:
            return attention(call)
        return _off_by_rounding(attention(call), call.query.dtype).to(call.query.dtype)

    noise = _differences(_dense_logits(model, joined, rows, attend, mixer).double(), theirs).cpu()
    return _compare_logits(answered, theirs, (floor + _MAX_NOISE_RATIO * noise).clamp_max(_MAX_LOGIT_LIMIT))


def _compare_logits(answered: Sequence[_Answered], theirs: Tensor, limits: Tensor) -> Comparison:
    """The median row of all prompts, cold or warm."""
    findings = []
    for name, part in (("cold", 0), ("warm", 1)):
        ours = torch.cat([each.logits.chunk(2)[part] for each in answered])
        differences = _differences(ours.double(), theirs).cpu()
        row = int((differences / limits).argsort()[len(limits) // 2])
        findings.append(Comparison(f"{name} logits", "one dense forward", float(differences[row]), float(limits[row])))
    return worst_finding(findings)


def _one_forward(layout: Layout) -> DenseLayout:
    """The layout with every token at the position where the question sees it."""
    written = dense(layout)
    assert written.is_one_forward
    return replace(written, positions=written.question_positions, distances=written.distances * 0)


def _side_by_side(layouts: Sequence[DenseLayout]) -> DenseLayout:
    """Several prompts in one forward, none of which sees another."""
    sizes = [len(layout.token_ids) for layout in layouts]
    total = sum(sizes)
    mask = np.zeros((total, total), dtype=np.bool_)
    for layout, last in zip(layouts, np.cumsum(sizes), strict=True):
        rows = slice(last - len(layout.token_ids), last)
        mask[rows, rows] = layout.mask
    return DenseLayout(
        token_ids=np.concatenate([layout.token_ids for layout in layouts]),
        positions=np.concatenate([layout.positions for layout in layouts]),
        mask=mask,
        distances=np.zeros(mask.shape, dtype=np.int64),
    )


def _dense_logits(
    model: LoadedModel, layout: DenseLayout, rows: Sequence[int], receiver: Receiver, mixer: Mixer | None
) -> Tensor:
    """[rows, V], logits of the tokens that the answers were sampled from."""
    return model.forward(
        torch.from_numpy(layout.token_ids).to(model.device),
        torch.from_numpy(layout.positions).to(model.device),
        torch.tensor(rows, device=model.device),
        receiver,
        mixer,
    )


class DenseStates:
    """The reference for layers with a state: what a span sees is run again, one span after the other, without maps."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts

    def __call__(self, layer: StateLayer, hidden: Tensor) -> Tensor:
        """See `Mixer`."""
        outputs: list[Tensor] = []
        first = 0
        for layout in self._layouts:
            sizes = [span.num_tokens for span in layout.spans]
            parts = torch.split(hidden[:, first : first + sum(sizes)], sizes, dim=1)
            first += sum(sizes)
            starts: list[LayerState | None] = []
            for span, part in zip(layout.spans, parts, strict=True):
                state: LayerState | None = None
                for index in sorted(view.span for view in span.views):
                    begin = starts[index]  # its first tokens have the tail that they had
                    if state is not None and state.memory is not None:
                        begin = LayerState({} if begin is None else begin.tails, state.memory)
                    elif state is None and begin is not None and begin.memory is not None:  # of what is not seen here
                        begin = LayerState(begin.tails, torch.zeros_like(begin.memory))
                    state = layer.run(parts[index], None if begin is None else begin.repeated(1))[1]
                starts.append(state)
                outputs.append(layer.run(part, None if state is None else state.repeated(1))[0])
        return torch.cat(outputs, dim=1)


def _off_by_rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers perturbed by up to one rounding to `dtype`, each independently, and reproducibly."""
    share = torch.linspace(-1, 1, 997, dtype=x.dtype, device=x.device)
    shares = share[torch.arange(x.numel(), device=x.device) * 541 % 997].view(x.shape)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * (1 + torch.finfo(dtype).eps * shares)


def _differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """[R], per row: root mean square differences in standard deviations; infinite if anything is NaN."""
    apart = (ours - theirs).square().mean(dim=1).sqrt() / theirs.std(dim=1).clamp_min(1e-12)
    return apart.nan_to_num(torch.inf)


def composed_prompts(tokens: Sequence[int], lengths: Sequence[Sequence[int]]) -> list[Prompt]:
    """Prompts of system text, documents and question with these numbers of tokens, cut from one text."""
    first = 0
    prompts = []
    for counts in lengths:
        parts = []
        for count in counts:
            parts.append(tokens[first : first + count])
            first += count
        prompts.append(Prompt.from_tokens(parts[0], parts[1:-1], parts[-1]))
    return prompts


BLOCK_SIZE = 4
NUM_ANSWER = 2
"""Tokens of an answer: one from the prefill, one decoded."""
_NUM_BLOCKS = 96


@dataclass(slots=True)
class RecordedStep:
    """One forward: its work, and every layer's attention."""

    works: list[ScheduledTokens]
    positions: Tensor
    """[T], positions of its rows."""
    calls: list[tuple[AttentionCall, Tensor]] = field(default_factory=list)
    """Of every layer: attention call and output."""
    stored: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of every layer: keys and values of the rows, read back from their slots after the step."""
    logits: Tensor | None = None
    """[R, V], of the works that need them."""

    def logits_of(self, request: Request) -> Tensor:
        """[R, V], of one request."""
        assert self.logits is not None, "the step has ended"
        owners = [work.sequence.request for work in self.works for _ in range(work.num_logits)]
        return self.logits[[index for index, owner in enumerate(owners) if owner is request]]


class RecordingRunner(Runner):
    """A runner that keeps the logits and the attention of every step."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend | None) -> None:
        super().__init__(model, {"request": _NUM_BLOCKS, "chunk_cache": _NUM_BLOCKS}, BLOCK_SIZE, backend)
        self.steps: list[RecordedStep] = []
        self.works: list[ScheduledTokens] = []
        """Work of the next step."""

    def run(self, spans: Sequence[SpanRows]) -> Tensor:
        """See `Runner.run`."""
        logits = super().run(spans)
        self.steps[-1].logits = logits
        self.steps[-1].stored = [self._stored(spans, layer.index) for layer in self.model.layers]
        return logits

    def _forward(self, batch: Batch, receiver: Receiver, mixer: Mixer | None = None) -> Tensor:
        step = RecordedStep(self.works, batch.positions)
        self.steps.append(step)

        def record(call: AttentionCall) -> Any:
            output = receiver(call)
            step.calls.append((call, output))
            return output

        return super()._forward(batch, record, mixer)

    def _stored(self, spans: Sequence[SpanRows], layer_index: int) -> tuple[Tensor, Tensor]:
        """Keys [T, G, D] and values [T, G, Dv] of the step's rows, slot by slot."""
        parts = []
        for rows in spans:
            storage = self.storages[rows.pool]
            everything = storage.run(layer_index, 0, storage.num_blocks * storage.block_size)
            parts.append([part[torch.tensor(rows.slots, device=part.device)] for part in everything])
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys), torch.cat(values)


class RecordingCore(EngineCore):
    """A core that tells its runner what the rows of each step are."""

    runner: RecordingRunner

    def _run(self, works: Sequence[ScheduledTokens]) -> Array:
        self.runner.works = list(works)
        return super()._run(works)


class RecordingEngine(Engine):
    """A small engine with a recording runner."""

    runner: RecordingRunner
    core_type = RecordingCore

    def __init__(
        self, model: LoadedModel, backend: AttentionBackend | None, strategy: str, context: ChunkContext
    ) -> None:
        config = ChunkCacheConfig(
            position_strategy=strategy, chunk_context=context, block_size=BLOCK_SIZE, repair="none"
        )
        kv_cache = KVCache(
            model.fingerprint,
            config,
            request_blocks=_NUM_BLOCKS,
            chunk_blocks=_NUM_BLOCKS,
            max_states=_NUM_BLOCKS if model.state_layers else 0,
        )
        super().__init__(RecordingRunner(model, backend), kv_cache, config, EngineConfig(max_num_batched_tokens=512))

    def answer(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Answers prompts in one batch, greedily, with `NUM_ANSWER` tokens each, by the base model without adapters.

        Raises:
            KVMosaicError: the error of a failed request.
        """
        params = SamplingParams(temperature=0, max_tokens=NUM_ANSWER, ignore_eos=True)
        return self.run([self.add_request(replace(prompt, adapter=""), params) for prompt in prompts])
