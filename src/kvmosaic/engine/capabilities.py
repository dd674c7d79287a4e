"""Capabilities of the engine for one model: what its layers allow."""

from __future__ import annotations

from kvmosaic.engine_protocol import Capability, EngineCapabilities
from kvmosaic.model.loaded import LoadedModel


def capabilities_of(model: LoadedModel, max_positions: int | None) -> EngineCapabilities:
    """What the engine can do with a model; the reasons are those of the errors that requests get."""
    missing: dict[Capability, str] = {}
    if not model.is_movable:
        missing[Capability.MOVE_KEYS] = missing[Capability.ROLLING_WINDOW] = model.immovable_reason
    elif (chunked := next((layer for layer in model.layers if layer.mask.kind == "chunked"), None)) is not None:
        missing[Capability.ROLLING_WINDOW] = (
            f"layer {chunked.index} attends in parts of {chunked.mask.size} tokens that begin at fixed places"
        )
    if (biased := next((layer for layer in model.layers if layer.bias is not None), None)) is not None:
        missing[Capability.REPAIR] = (
            f"layer {biased.index} of this model adds a bias by distance, which is only done for neighbours"
        )
    if model.tokenizer is None:
        missing[Capability.STRUCTURED_OUTPUT] = "this model has no tokenizer"
    return EngineCapabilities("transformers", model.vocab_size, max_positions, missing)
