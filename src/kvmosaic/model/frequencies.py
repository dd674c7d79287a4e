"""Rotary frequencies: collects a model's buffers, and pins frequencies that change with the longest position.

Dynamic NTK and LongRoPE choose their frequencies by the longest position of the whole batch and write them into the
module: one long request would change every other one, and invalidate all cached keys. They are chosen once, for the
longest sequence the model will run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.errors import InvalidConfig

_PINNED = "kvmosaic_pinned_positions"
"""Attribute of a module with the length its frequencies are pinned for."""
_SHORT_LENGTH = "kvmosaic_short_length"
"""Attribute with the length up to which transformers would use other ones."""


def frequency_buffers(module: nn.Module) -> list[Tensor]:
    """Every distinct `*inv_freq` buffer of a model, each [pairs], and the frequencies of its sine and cosine tables."""
    found: list[Tensor] = []
    for name, buffer in module.named_buffers():
        is_frequency = name.endswith("inv_freq") and not name.endswith("original_inv_freq") and buffer.dim() == 1
        if name.endswith("embed_positions") and buffer.dim() == 2 and len(buffer) > 1 and not buffer.shape[1] % 2:
            buffer, is_frequency = _frequencies_of_table(buffer), True
        if is_frequency and not any(torch.equal(buffer, other) for other in found):
            found.append(buffer)
    return found


def _frequencies_of_table(table: Tensor) -> Tensor:
    """The angle per position of a table of sines and cosines, [positions, 2 * pairs]: that of row 1."""
    sines, cosines = table[1].to(torch.float64).chunk(2)
    return torch.atan2(sines, cosines)


def changes_with_length(module: nn.Module) -> bool:
    """Whether any frequencies depend on the longest position of a batch, or did before they were pinned."""
    return _PINNED in module.__dict__ or any(True for _ in _changing(module))


def pin_frequencies(module: nn.Module, max_positions: int) -> None:
    """Fixes all frequencies as if a sequence of `max_positions` were in every batch. Static ones stay unchanged.

    For LongRoPE this means the long factors whenever `max_positions` exceeds the original length.

    Raises:
        InvalidConfig: the model was pinned for another length before.
    """
    pinned_for = module.__dict__.get(_PINNED)
    if pinned_for not in (None, max_positions):
        raise InvalidConfig(
            f"this model's frequencies are pinned for {pinned_for} positions already, and {max_positions} are asked "
            f"for; use max_positions={pinned_for} or load the model again"
        )
    if not changes_with_length(module):
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    module.__dict__[_PINNED] = max_positions
    for rotary, layer_type, rope_type in list(_changing(module)):
        prefix = f"{layer_type}_" if layer_type else ""
        buffer: Tensor = getattr(rotary, f"{prefix}inv_freq")
        keywords = {"layer_type": layer_type} if layer_type else {}
        pinned, scaling = ROPE_INIT_FUNCTIONS[rope_type](
            rotary.config, buffer.device, seq_len=max_positions, **keywords
        )
        short, _ = ROPE_INIT_FUNCTIONS[rope_type](rotary.config, buffer.device, seq_len=1, **keywords)
        if not buffer.is_meta and not torch.equal(short.to(pinned), pinned):
            module.__dict__[_SHORT_LENGTH] = _original_length(rotary.config, layer_type)
        buffer.copy_(pinned.to(buffer.device, buffer.dtype))
        if isinstance(rotary.rope_type, dict):
            rotary.rope_type = {**rotary.rope_type, layer_type: "default"}
        else:
            rotary.rope_type = "default"
        if hasattr(rotary, "rope_init_fn"):
            _pin_recomputed(rotary, pinned, scaling, max_positions)


def pinned_note(module: nn.Module) -> str:
    """How a model with pinned frequencies differs from transformers' own; empty if it does not."""
    length = module.__dict__.get(_SHORT_LENGTH)
    if length is None:
        return ""
    return (
        f"rotary frequencies are those for texts of more than {length:,} positions; up to {length:,}, transformers "
        f"uses others, and its generate may answer differently (max_model_len={length} takes those)"
    )


def _original_length(config: Any, layer_type: str | None) -> int:
    """The length from which on a configuration's frequencies change."""
    parameters = config.rope_parameters
    parameters = parameters.get(layer_type, parameters) if layer_type else parameters
    original = parameters.get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None)
    return int(original or config.max_position_embeddings)


def _changing(module: nn.Module) -> Iterator[tuple[Any, str | None, str]]:
    """Rotary modules whose frequencies change: (module, layer type or None, rope type)."""
    for rotary in module.modules():
        rope_type = getattr(rotary, "rope_type", None)
        if isinstance(rope_type, str):
            kinds: dict[str | None, str] = {None: rope_type}
        elif isinstance(rope_type, dict):
            kinds = {str(name): str(kind) for name, kind in rope_type.items()}
        else:
            continue
        for layer_type, kind in kinds.items():
            if "dynamic" in kind or kind == "longrope":
                yield rotary, layer_type, kind


def _pin_recomputed(rotary: Any, pinned: Tensor, scaling: float, max_positions: int) -> None:
    """Pins a module that recomputes its frequencies in every forward (Phi-MoE)."""
    rotary.rope_init_fn = lambda *_, **__: (pinned, scaling)
    parameters = dict(rotary.config.rope_parameters)
    if "long_mscale" in parameters:
        is_long = max_positions > parameters["original_max_position_embeddings"]
        chosen = parameters["long_mscale" if is_long else "short_mscale"]
        rotary.config = copy.deepcopy(rotary.config)
        rotary.config.rope_parameters = {**parameters, "long_mscale": chosen, "short_mscale": chosen}
