"""Capabilities of the engine for one model: what its layers allow."""

from __future__ import annotations

from kvmosaic.engine_protocol import Capability, EngineCapabilities
from kvmosaic.model.loaded import LoadedModel


def capabilities_of(model: LoadedModel, max_positions: int | None) -> EngineCapabilities:
    """What the engine can do with a model; the reasons are those of the errors that requests get."""
    missing = {
        Capability.MOVE_KEYS: "" if model.is_movable else model.immovable_reason,
        Capability.ROLLING_WINDOW: model.no_window_reason,
        Capability.REPAIR: model.no_repair_reason,
        Capability.STRUCTURED_OUTPUT: "" if model.tokenizer is not None else "this model has no tokenizer",
    }
    missing = {capability: reason for capability, reason in missing.items() if reason}
    return EngineCapabilities("transformers", model.vocab_size, max_positions, missing)
