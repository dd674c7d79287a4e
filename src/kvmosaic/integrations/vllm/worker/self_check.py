"""Self-check at startup: moved keys and values must be what the model would have computed there, in every layer."""

from __future__ import annotations

import logging

import torch

from kvmosaic.integrations.vllm.worker.extra_forward import ExtraForward
from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout
from kvmosaic.integrations.vllm.worker.trial.model_trial import ModelTrial
from kvmosaic.integrations.vllm.worker.trial.plan import HEAD_TOKENS, NUM_TOKENS, TrialPlan, far_positions
from kvmosaic.integrations.vllm.worker.trial.rotation import direct_trouble
from kvmosaic.integrations.vllm.worker.trial.text import ordinary_tokens

_log = logging.getLogger(__name__)


@torch.inference_mode()
def check(places: KVLayout, nested: ExtraForward) -> str:
    """Why moved chunks would differ from what the model computes; empty: they do not.

    Runs before any request is served: its blocks are unused, and it zeroes them afterwards. Every worker runs the same
    forwards whatever it finds, so that workers that compute together stay in sync.
    """
    length = min([nested.max_length, *(place.rotation.num_positions for place in places.layers if place.rotation)])
    num_tokens = min(NUM_TOKENS, nested.max_tokens, length - 1)
    last = length - min(HEAD_TOKENS, num_tokens) - 1
    if num_tokens < 4 or last < 1:
        return f"prompts of at most {nested.max_length} tokens are too short for the check at start"
    plan = TrialPlan.of(
        ordinary_tokens(nested.model_config, num_tokens),
        far_positions(last),
        block_size=places.block_size,
        num_blocks=min(places.num_blocks, nested.num_blocks),
        max_runs=min(nested.max_runs, nested.max_tokens // HEAD_TOKENS),
    )
    if isinstance(plan, str):
        return plan
    try:
        found = ModelTrial(places, nested, plan).trouble()
        _clear(places, plan.blocks)
        return found
    except Exception as error:  # vLLM must start, without composing, whatever its parts raise
        return f"the check at start failed: {type(error).__name__}: {error}"[:400]


@torch.inference_mode()
def check_rotations(places: KVLayout, max_length: int) -> str:
    """The part of the check without a forward: every rotary embedding is called directly."""
    turnings = {place.rotation: place for place in places.layers if place.rotation is not None}
    for rotation, place in turnings.items():
        last = min(max_length, rotation.num_positions) - HEAD_TOKENS - 1
        try:
            found = direct_trouble(place, far_positions(last))
        except Exception as error:  # another signature, or not callable outside a forward: unknown
            _log.info("kvmosaic: the rotation of %s was not tried: %s", place.name, error)
            continue
        if found:
            return f"{place.name}: {found}"
    return ""


def _clear(places: KVLayout, blocks: tuple[int, ...]) -> None:
    """Zeroes blocks, as vLLM's own allocation does."""
    slots = places.slots(blocks, 0, len(blocks) * places.block_size).to(places.device)
    for place in places.layers:
        keys, values = place.layout.read(slots)
        place.layout.write(slots, torch.zeros_like(keys), None if values is None else torch.zeros_like(values))
