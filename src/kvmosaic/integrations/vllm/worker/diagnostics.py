"""Worker diagnostics: detected layouts, and a comparison of moved with computed keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvmosaic.integrations.vllm.operations import Move
from kvmosaic.integrations.vllm.worker import extra_forward, position_shift
from kvmosaic.integrations.vllm.worker.composing_worker import ComposingWorker
from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout, LayerPlace


@dataclass(frozen=True, slots=True)
class WorkerDiagnostics:
    """The state of one worker, for people."""

    rank: str
    device: str
    num_layers: int
    layouts: tuple[str, ...]
    """Layout names, each with its number of layers."""
    rotations: tuple[str, ...]
    trouble: str
    no_repair: str
    no_shift: str


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """Differences of moved from computed keys and values of the first layer, relative to the largest computed one."""

    keys: float
    unturned: float
    """The same without rotation, for comparison with a wrong rotation."""
    values: float | None
    """None: a latent cache has no separate values."""
    allowed: float


def diagnose(worker: Any) -> WorkerDiagnostics:
    """What the worker found out about its share of the model. Called in every worker, with vLLM's own."""
    from vllm.distributed import get_pp_group, get_tp_group

    composing = _composing()
    places = composing.places
    config, kv_cache_config = composing.configuration
    layers = places.layers if places else ()
    return WorkerDiagnostics(
        rank=f"{get_pp_group().rank_in_group}.{get_tp_group().rank_in_group}",
        device=str(places.device) if places else str(getattr(worker, "device", "?")),
        num_layers=len(layers),
        layouts=_counted(f"{_words(place.layout)}, blocks of {place.layout.block_size}" for place in layers),
        rotations=_counted(_rotation(place) for place in layers),
        trouble=composing.facts.trouble,
        no_repair="" if composing.facts.can_repair else extra_forward.can_run(config, kv_cache_config) or "it failed",
        no_shift=""
        if composing.facts.can_shift
        else (position_shift.can_shift(config, kv_cache_config, places.root) if places else "") or "it failed",
    )


def compare_keys(worker: Any, move: Move, computed_blocks: Sequence[int], computed_start: int) -> KeyDifference | None:
    """Carries out a move and compares the result with what the model computed at that position.

    Args:
        worker: vLLM's own.
        move: a move into unused blocks.
        computed_blocks: hold the same tokens, computed `move.distance` positions further on.
        computed_start: the slot of the first of them.

    Returns:
        The differences; None on a worker without the model's first layer.
    """
    from vllm.distributed import get_pp_group

    places, mover = _composing().places, _composing().mover
    if not get_pp_group().is_first_rank or places is None or mover is None:
        return None
    place = min(places.layers, key=lambda place: int((re.findall(r"\d+", place.name) or ["0"])[0]))
    mover.move([move])
    moved = _read(places, place, move.target_blocks, move.target_start, move.num_tokens)
    source = _read(places, place, move.source_blocks, move.source_start, move.num_tokens)
    computed = _read(places, place, computed_blocks, computed_start, move.num_tokens)
    dtype = computed[0].dtype
    return KeyDifference(
        keys=_difference(moved[0], computed[0]),
        unturned=_difference(source[0], computed[0]),
        values=None if moved[1] is None or computed[1] is None else _difference(moved[1], computed[1]),
        allowed=8 * torch.finfo(dtype).eps,
    )


def _composing() -> ComposingWorker:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvmosaic.integrations.vllm.connector import ComposingConnector

    connector = get_kv_transfer_group()
    assert isinstance(connector, ComposingConnector) and connector._worker is not None
    return connector._worker


def _read(
    places: KVLayout, place: LayerPlace, blocks: Sequence[int], start: int, num_tokens: int
) -> tuple[Tensor, Tensor | None]:
    return place.layout.read(places.slots(blocks, start, num_tokens).to(places.device))


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def _counted(said: Any) -> tuple[str, ...]:
    return tuple(f"{count} x {what}" for what, count in Counter(said).items())


def _words(layout: Any) -> str:
    return " ".join(re.findall("[A-Z][a-z0-9]*", type(layout).__name__.removesuffix("Layout"))).lower()


def _rotation(place: LayerPlace) -> str:
    rotation = place.rotation
    if rotation is None:
        return "not turned"
    pairs = "neighbours" if rotation.layout == "interleaved" else "halves"
    return f"{rotation.rotary_dim} of {place.layout.key_size} numbers from {rotation.first} on, paired by {pairs}"
