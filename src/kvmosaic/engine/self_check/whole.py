"""Self-check: does this model, on this machine, give composed what it gives in one dense forward?

    rows        every token has its own queries, keys and values, and keys rotate as detected: near and far
    layers      attention of every layer equals its own code; fused operations equal what they replace
    composed    attention over cached pieces equals dense attention, first per layer, then in the logits

Each check is made where no error has accumulated, so that the result depends neither on the prompt nor on rounding
in earlier layers. Only the logits are about whole forwards, and they are judged against the model's own noise.

Rows: in two forwards attention returns each token's own value, so that rows can depend only on token and position.
The same rows in another order must be the same rows: this finds queries scaled by the row number, or inputs mixed from
earlier tokens. One token at many positions must equal itself in the same row of the other forward, at position 0,
rotated: rounding, which differs from row to row, is the same in both.

Layers: one forward of the model's own code over ordinary text. In every layer its own attention function (with its own
mask, windows, soft caps and sinks) gets the same queries, keys and values as dense attention configured by `LayerSpec`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvmosaic.attention import AttentionBackend
from kvmosaic.attention.dense import DenseAttention
from kvmosaic.engine.self_check import Comparison, SelfCheck, ordinary_tokens, worst_finding
from kvmosaic.engine.self_check.choices import Choices
from kvmosaic.engine.self_check.composed import check_composed, composed_prompts, moves
from kvmosaic.layers import AttentionCall, LayerSpec
from kvmosaic.layout import arrange, dense
from kvmosaic.model.adapters import installed_adapters
from kvmosaic.model.cpu.fused import Fused
from kvmosaic.model.hook import attention_scope
from kvmosaic.model.indexer import few_keys
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.probe.adapter_layers import check_against_own_code
from kvmosaic.model.probe.own_code import FusedCall, run_own_code
from kvmosaic.model.probe.probe import record_calls
from kvmosaic.prompt import Prompt
from kvmosaic.rope import ROTATION_TOLERANCES, Heads, of_equal_length, relative_error, turned_error

_MIN_POSITIONS = 50
_LENGTHS = ((9, 7, 13, 5, 12), (4, 11, 9, 10), (6, 8, 3, 14, 7))
"""Number of tokens of system text, documents and question of the composed prompts."""
_LONG = (9, 67, 13, 12)
"""Replaces the first one, if the model has the positions: a document longer than any tile of a kernel."""
_NUM_CHOSEN = 12
"""Keys that an indexer chooses while it is checked, if it chooses more."""
_NUM_CPU_ROWS, _NUM_GPU_ROWS = 128, 512
"""Rows of forwards that test effects on late rows only; multiples of all tiles, so that rows round alike."""


def run_self_check(model: LoadedModel, backend: AttentionBackend | None = None) -> SelfCheck:
    """Runs the check: about eight forwards, some 1,000 rows in all."""
    is_moved = moves(model)
    if model.max_positions is not None and model.max_positions < _MIN_POSITIONS:
        error = f"the check needs {_MIN_POSITIONS} positions, this model has {model.max_positions}"
        return SelfCheck((), is_moved, error)
    lengths = (_LONG if _most(model, sum(_LONG) + 8) == sum(_LONG) + 8 else _LENGTHS[0], *_LENGTHS[1:])
    num_rows = _most(model, _NUM_CPU_ROWS if model.device.type == "cpu" else _NUM_GPU_ROWS)
    num_tokens = max(num_rows, sum(sum(counts) for counts in lengths))
    tokens = ordinary_tokens(model.tokenizer, model.vocab_size, num_tokens)
    rows = tokens[:num_rows]
    findings: list[Comparison] = []
    choices = Choices()
    try:
        findings += check_rows(model, rows)
        with few_keys(model.module, _NUM_CHOSEN):
            findings += check_layers(model, rows, choices)
            findings += check_composed(model, composed_prompts(tokens, lengths), backend)
    except Exception as error:  # a failure here would also fail in an answer
        return SelfCheck(tuple(findings), is_moved, f"{type(error).__name__}: {error}")
    return SelfCheck(tuple(findings), is_moved, note=choices.note)


def _most(model: LoadedModel, count: int) -> int:
    """Returns `count`, or fewer if the model's max position or max tokens per forward is lower."""
    return min(limit for limit in (count, model.max_positions, model.max_forward_tokens) if limit is not None)


_ATTENTION_LIMIT = 1e-3
"""Both sides compute in float32 or wider; a wrong mask, scale or soft cap changes outputs by tenths."""
_LATENT_LIMITS = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""For queries absorbed into the latent, which are rounded once more."""
_MAX_OPENED_TOKENS = 128
"""Adapted modules are compared in the model's own dtype, where rounding of a bias grows with the distance."""
_FUSED_LIMIT = 5e-2
"""Relative to what a module adds to its input, averaged: another order of rounding to bfloat16 makes a hundredth."""
_ROUNDING = 2.0**-6
"""Two units in the last place of bfloat16 either way: such differences of single numbers do not count."""


def check_layers(model: LoadedModel, tokens: Sequence[int], choices: Choices | None = None) -> list[Comparison]:
    """Findings on attention, and on fused operations and chosen keys if any.

    None for adapted modules, which raise instead; `choices` counts equal scores.

    Raises:
        UnsupportedModel: an adapted attention module differs from its own code.
        ModelError: the model's own attention function is not found.
    """
    if opened := installed_adapters(model.module):  # these compare themselves: they have no attention function
        with torch.inference_mode():
            check_against_own_code(model.module, opened, list(model.layers), None, min(len(tokens), _MAX_OPENED_TOKENS))
        return []
    found: list[Comparison] = []
    facts = DenseAttention(dense(arrange(Prompt.plain(tokens))), model.layers)
    choices = choices or Choices()

    def compare(call: AttentionCall, theirs: Tensor) -> None:
        if call.num_chosen:
            scores = facts.index_scores(call, call.query, call.key, call.value)
            is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, theirs.long(), True)
            choices.compare(call, scores, is_chosen & scores.isfinite(), is_ours=False)
            return
        ours, limit = facts.attend(call, call.query, call.key, call.value), _ATTENTION_LIMIT
        if call.latent is not None:
            ours, limit = call.latent.expand(ours), _LATENT_LIMITS.get(call.query.dtype, limit)
        difference = _difference(ours, theirs)
        found.append(Comparison("attention", "the model's own code", difference, limit, f"layer {call.layer_index}"))

    calls = run_own_code(model, tokens, compare)
    findings = [worst_finding(found), *choices.worst()]
    if calls:
        fused = [
            Comparison("fused form", "its own code", _fused_difference(call, facts), _FUSED_LIMIT, _name(call.form))
            for call in calls
        ]
        findings.append(worst_finding(fused))
    return findings


def _fused_difference(call: FusedCall, attention: DenseAttention) -> float:
    """Mean difference of a fused form from its module's own code, in means of what the module adds to its input."""

    def attend(call: AttentionCall) -> Tensor:  # to all keys, as the module's own code did
        return attention(call if call.num_chosen else replace(call, chosen=None))

    with torch.inference_mode(), attention_scope(attend):
        result = call.form.forward(*call.arguments, **call.named)
    ours, theirs = (result[0] if isinstance(result, tuple) else result).double(), call.output.double()
    added = theirs - call.arguments[0].double() if call.form.kind == "layers" else theirs
    apart = ((ours - theirs).abs() - _ROUNDING * theirs.abs()).clamp_min(0).mean(dim=-1)
    rows = apart / added.abs().mean(dim=-1).clamp_min(1e-30)
    return float(rows.max().nan_to_num(math.inf))


def _name(form: Fused) -> str:
    index = getattr(getattr(form.module, "self_attn", form.module), "layer_idx", None)
    return type(form.module).__name__ if index is None else f"layer {index}"


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of a row, in root mean squares of the output."""
    apart = (ours.double() - theirs.double()).square().mean(dim=(1, 2)).sqrt().max()
    return float((apart / theirs.double().square().mean().sqrt().clamp_min(1e-30)).nan_to_num(math.inf))


_MIXING = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference of a reordered row that rounding explains; rarely, another expert is chosen."""
_FINE_MIXING = 1e-4
_GROUP = 16
"""Rows per median: a defect shows in all rows from some number on, a tied expert in one of them."""
_FARTHEST = 100_000
_ANGLE_ERROR = 2.0**-22
"""At a far position: transformers multiplies position and frequency in float32."""


def check_rows(model: LoadedModel, tokens: Sequence[int]) -> list[Comparison]:
    """Two findings, on rows and on rotation; the second one only if keys can be moved.

    Raises:
        UnsupportedModel: the model cannot run these rows.
    """
    far = far_positions(model.max_positions)
    positions = row_positions(len(tokens), model.max_positions)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    permuted = order.tolist()
    again = [tokens[0]] * len(far)
    with torch.inference_mode():
        rows = record_calls(model.module, [*tokens, *again], [*positions, *far])
        others = record_calls(
            model.module,
            [*(tokens[row] for row in permuted), *again],
            [*(positions[row] for row in permuted), *[0] * len(far)],
        )
        findings = [_check_order(rows, others, order.to(model.device))]
        if model.is_movable:
            moved, home = ([_rows_from(call, len(tokens)) for call in calls] for calls in (rows, others))
            findings.append(_check_rotation(model.layers, moved, home, torch.tensor(far)))
    return findings


def row_positions(num_rows: int, max_positions: int | None) -> list[int]:
    """Positions of rows: the first half near, the others from 600 on, if the model has them."""
    limit = max_positions or _FARTHEST
    start = 600 if limit >= 600 + num_rows else max(limit - num_rows, 0)
    half = num_rows // 2
    return [*range(half), *range(start + half, start + num_rows)]


def far_positions(max_positions: int | None) -> list[int]:
    """Position 0, near ones, and increasingly far ones up to the model's max position."""
    limit = min(max_positions or _FARTHEST, _FARTHEST)
    positions = [0, 1, 7, 64, 200, 500, 601, 1000]
    while positions[-1] < limit:
        positions.append(positions[-1] * 8 // 5)
    return [*(position for position in positions if position < limit - 1), limit - 1]


def _rows_from(call: AttentionCall, first: int) -> Heads:
    return call.query[first:], call.key[first:], call.value[first:]


def _check_order(rows: list[AttentionCall], others: list[AttentionCall], order: Tensor) -> Comparison:
    limit = _MIXING.get(rows[0].query.dtype, _FINE_MIXING)
    findings = []
    for call, other in zip(rows, others, strict=True):
        for mine, theirs in zip(call.rows, other.rows, strict=True):
            change = relative_error(theirs[: len(order)].double(), mine[order].double()).square().mean(dim=-1).sqrt()
            # by row of the first forward, and of the second one
            changes = torch.stack((change[order.argsort()], change))
            medians = [part.median(dim=1).values.max() for part in torch.split(changes, _GROUP, dim=1)]
            difference = float(torch.stack(medians).max())
            findings.append(
                Comparison("a token", "itself in another row", difference, limit, f"layer {call.layer_index}")
            )
    return worst_finding(findings)


def _check_rotation(
    layers: Sequence[LayerSpec], moved: list[Heads], home: list[Heads], positions: Tensor
) -> Comparison:
    findings = []
    for layer, (query, key, value), (home_query, home_key, home_value) in zip(layers, moved, home, strict=True):
        limits = ROTATION_TOLERANCES[key.dtype] + _ANGLE_ERROR * positions
        errors = torch.stack(
            (
                relative_error(value.double(), home_value.double()).amax(dim=-1).cpu(),
                turned_error(key, home_key, positions, layer.rotation),
                turned_error(
                    of_equal_length(query.double(), home_query.double()), home_query, positions, layer.rotation
                ),
            )
        ).amax(dim=0)
        farthest = int((errors / limits).nan_to_num(torch.inf).argmax())
        findings.append(
            Comparison(
                "rotation",
                "the model's own",
                float(errors[farthest]),
                float(limits[farthest]),
                f"layer {layer.index} at position {int(positions[farthest])}",
            )
        )
    return worst_finding(findings)
