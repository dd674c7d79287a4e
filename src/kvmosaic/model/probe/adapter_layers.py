"""Adapted layers: detects their bias by distance (ALiBi), and checks them against their own code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvmosaic.attention import attend_plain
from kvmosaic.errors import UnsupportedModel
from kvmosaic.layers import AttentionCall, DistanceBias, LayerSpec
from kvmosaic.model.adapters import AttentionAdapter
from kvmosaic.model.hook import attention_scope
from kvmosaic.model.probe.masks import expected_mask

_NUM_TOKENS = 48
"""Tokens on which an adapted layer is compared with its own code."""
_NUM_POSITIONS = 2100
"""Positions whose bias is read: enough to detect rounding to 16 bits, which are exact up to 2048."""
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Difference, relative to the output, that rounding the bias and the weights to 16 bits explains."""
_FINE_TOLERANCE = 1e-4
_ROUNDED = "its bias by distance is rounded to {}, so that it is not the same everywhere"


def with_biases(
    module: Any, opened: list[AttentionAdapter], layers: list[LayerSpec], max_positions: int | None
) -> list[LayerSpec]:
    """Detects the bias of every adapted layer, and checks each against its module's own code.

    Args:
        module: the transformers model.
        opened: its adapted attention modules.
        layers: their specifications.
        max_positions: max position of its configuration.

    Raises:
        UnsupportedModel: a bias that is not linear in the distance, or an adapted layer whose output differs.
    """
    bias = _find_bias(module, opened[0], max_positions)
    if bias is not None:
        reason = "" if bias.rounding is None else _ROUNDED.format(str(bias.rounding).removeprefix("torch."))
        layers = [
            replace(
                layer,
                bias=bias,
                is_movable=layer.is_movable and not reason,
                immovable_reason=layer.immovable_reason or reason,
            )
            for layer in layers
        ]
    check_against_own_code(module, opened, layers, max_positions)
    return layers


def read_bias(numbers: Tensor, dtype: torch.dtype, factor: float = 1.0) -> DistanceBias | None:
    """Detects the slopes of a bias that a model built.

    Args:
        numbers: [H, P], the bias for the keys at P consecutive positions, 0 for one of them.
        dtype: the model's. If the numbers are rounded to it, so is everything else the model does: the rounding is not
            imitated, and the slopes are the ones that explain all numbers.
        factor: see `DistanceBias`.

    Returns:
        The bias, or None if the numbers are not slopes times positions.
    """
    exact = numbers.to(torch.float64)
    zeros = (exact == 0).all(dim=0).nonzero()
    if len(zeros) != 1 or numbers.shape[1] < 2:
        return None
    steps = torch.arange(numbers.shape[1], device=numbers.device) - zeros[0]
    neighbour = int(zeros[0]) + (1 if int(zeros[0]) + 1 < numbers.shape[1] else -1)
    slopes = exact[:, neighbour] / steps[neighbour]
    is_own_rounding = numbers.dtype.itemsize > 2 or numbers.dtype is dtype
    if is_own_rounding and torch.equal((slopes[:, None] * steps).to(numbers.dtype).to(torch.float64), exact):
        return DistanceBias(tuple(slopes.tolist()), None, factor)
    for rounding in (torch.bfloat16, torch.float16, torch.float32):
        product = slopes[:, None] * steps.to(rounding).to(torch.float64)
        if torch.equal(product.to(rounding).to(torch.float64), exact):
            return DistanceBias(tuple(slopes.tolist()), None if rounding is dtype else rounding, factor)
    if numbers.dtype is dtype and dtype.itemsize == 2:
        return _slopes_before_rounding(exact, slopes, steps, dtype, factor)
    return None


def _slopes_before_rounding(
    numbers: Tensor, slopes: Tensor, steps: Tensor, dtype: torch.dtype, factor: float
) -> DistanceBias | None:
    """The slopes that explain all numbers as rounded products of slope and step, within a small margin."""
    is_exact = ((slopes[:, None] * steps).to(dtype).to(torch.float64) == numbers).all(dim=1)
    moved = steps != 0
    numbers, steps = numbers[:, moved].abs(), steps[moved].abs()
    # half of the distance of two adjacent numbers in this dtype
    room = torch.finfo(dtype).eps / 4 * torch.exp2(torch.frexp(numbers).exponent.to(torch.float64))
    lowest, highest = ((numbers - room) / steps).amax(dim=1), ((numbers + room) / steps).amin(dim=1)
    if bool((is_exact | (lowest <= highest)).all()):
        return DistanceBias(tuple(torch.where(is_exact, slopes, (lowest + highest) / 2).tolist()), None, factor)
    return None


def _find_bias(module: Any, opened: AttentionAdapter, max_positions: int | None) -> DistanceBias | None:
    """The bias that the model passes to its attention modules; None if it passes none."""
    if not opened.bias_name:
        return None
    count = min(_NUM_POSITIONS, max_positions or _NUM_POSITIONS)
    numbers = _handed_over(module, opened, count)
    if numbers is None:
        return None
    dtype = module.get_input_embeddings().weight.dtype
    bias = read_bias(numbers.flatten(0, -2), dtype, opened.bias_factor)
    if bias is None:
        raise UnsupportedModel(
            f"{type(module).__name__} adds a bias to its scores that is not a slope times the distance and so "
            "cannot be composed from parts; use a model with rotary positions or plain ALiBi"
        )
    return bias


class _Enough(Exception):
    """Raised at the first attention module: the rest of the forward is not needed."""


def _handed_over(module: Any, opened: AttentionAdapter, num_tokens: int) -> Tensor | None:
    """The bias argument of the first attention module in a forward of `num_tokens` tokens."""
    found: list[Tensor | None] = []
    signature = inspect.signature(type(opened.module).forward)

    def stop(part: Any, arguments: Any, named: Any) -> None:
        found.append(signature.bind(part, *arguments, **named).arguments.get(opened.bias_name))
        raise _Enough

    handle = opened.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        _forward(module, [3] * num_tokens)
    except _Enough:
        pass
    finally:
        handle.remove()
    return found[0] if found else None


def check_against_own_code(
    module: Any,
    opened: list[AttentionAdapter],
    layers: list[LayerSpec],
    max_positions: int | None,
    num_tokens: int = _NUM_TOKENS,
) -> None:
    """Compares every adapted layer with its original code, on the hidden states of one forward.

    Raises:
        UnsupportedModel: an adapted layer whose output differs.
    """
    recorded: list[tuple[AttentionAdapter, Any, Any, Tensor]] = []
    handles = []
    for part in opened:

        def keep(_: Any, arguments: Any, named: Any, output: Any, part: AttentionAdapter = part) -> None:
            recorded.append((part, arguments, named, output[0]))

        handles.append(part.module.register_forward_hook(keep, with_kwargs=True))
    vocab_size = int(module.config.get_text_config().vocab_size)
    count = min(num_tokens, max_positions or num_tokens)
    try:
        _forward(module, [(vocab_size // 3 + 7 * number) % vocab_size for number in range(count)])
    finally:
        for handle in handles:
            handle.remove()
    for part, arguments, named, expected in recorded:
        with attention_scope(_written_out(layers[part.layer_index])):
            result = part.module(*arguments, **named)[0]
        tolerance = _TOLERANCE.get(expected.dtype, _FINE_TOLERANCE)
        size = expected.double().square().mean().sqrt()
        difference = float((result.double() - expected.double()).square().mean().sqrt() / size.clamp_min(1e-30))
        if not difference <= tolerance:
            raise UnsupportedModel(
                f"{type(part.module).__name__}: opened for the cache, layer {part.layer_index} differs from its own "
                f"code by {difference:.1g} (allowed: {tolerance:g}), so it does something that is not known here; "
                "load it with transformers' default attn_implementation, or use another model"
            )


def _written_out(layer: LayerSpec) -> Callable[[AttentionCall], Tensor]:
    """A receiver that computes a layer from its specification, with written-out scores."""

    def attend(call: AttentionCall) -> Tensor:
        places = torch.arange(len(call.query), device=call.query.device)
        precision = torch.promote_types(call.query.dtype, torch.float32)
        bias = None
        if layer.bias is not None:
            bias, _ = layer.bias.of_run(len(places), torch.zeros_like(places), places, precision)
        mask = expected_mask(layer.mask, places[:, None], places[None, :])
        return attend_plain(call.query, call.key, call.value, scaling=call.scaling, mask=mask, bias=bias)[0]

    return attend


def _forward(module: Any, tokens: list[int]) -> None:
    """A forward of the model's own code, including positions."""
    device = module.get_input_embeddings().weight.device
    try:
        module(input_ids=torch.tensor([tokens], device=device), use_cache=False)
    except (_Enough, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the model's code raises, the answer is the same
        dtype = str(module.get_input_embeddings().weight.dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"{type(module).__name__} fails on {len(tokens)} tokens by its own code in {dtype} "
            f"({type(error).__name__}: {error}); try another dtype, or another model"
        ) from error
