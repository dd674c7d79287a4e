"""The check at start: what is moved must be what the model would have computed there, in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmosaic.errors import KVMosaicError
from kvmosaic.integrations.vllm.operations import Move, Repair
from kvmosaic.integrations.vllm.worker.moving import Mover
from kvmosaic.integrations.vllm.worker.nested import Nested
from kvmosaic.integrations.vllm.worker.places import LayerPlace, Places
from kvmosaic.integrations.vllm.worker.repairing import Repairer
from kvmosaic.integrations.vllm.worker.turning import arithmetic

NUM_TOKENS = 24
DISTANCE = 37


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far numbers may lie apart, in parts of their size."""

    turned: float
    """Of one token repeated: every token sees the same, so only rounding is left, however many layers there are."""
    seen: float
    """Of different tokens: rounded angles move attention weights, and layers add it up."""


TOLERANCES = {
    torch.float64: Tolerance(turned=1e-4, seen=1e-2),
    torch.float32: Tolerance(turned=1e-4, seen=1e-2),
    torch.float16: Tolerance(turned=2e-2, seen=0.2),
    torch.bfloat16: Tolerance(turned=5e-2, seen=0.2),
}


def check(places: Places, nested: Nested) -> str:
    """Why moved chunks would not be what the model computes; empty: they are.

    Runs before anything is served: its blocks are in nobody's use, and it leaves zeros in them. Every worker runs the
    same forwards whatever it finds, so that workers that compute together stay together.
    """
    num_tokens = min(NUM_TOKENS, (nested.max_length - 1) // 2)
    blocks_per_run = -(-(num_tokens + 1) // places.block_size)
    needed = 7 * blocks_per_run
    if needed >= min(places.num_blocks, nested.num_blocks):
        return f"a cache of {places.num_blocks} blocks has no room for the check at start, which takes {needed}"
    # block 0 is vLLM's stand-in for no block
    blocks = iter(range(1, 1 + needed))
    runs = [tuple(next(blocks) for _ in range(blocks_per_run)) for _ in range(7)]
    try:
        found = _Check(places, nested, num_tokens, runs).trouble()
        _clear(places, runs)
        return found
    except Exception as error:  # vLLM comes up, without composing, whatever its parts say to being called
        return f"the check at start failed: {type(error).__name__}: {error}"[:400]


class _Check:
    """Runs of tokens, each alone in its blocks, and their comparison.

    tokens       different: a b c …    repeated: a a a …
    position     0                     0
                 distance              distance              keys of the first, turned, are the keys of these
                 near the end          near the end
    moved        the first of `different`, by the distance; one more token behind it gets the keys and values
                 that it has behind the second
    """

    def __init__(self, places: Places, nested: Nested, num_tokens: int, runs: list[tuple[int, ...]]) -> None:
        self.places, self.nested, self.num_tokens = places, nested, num_tokens
        last = nested.max_length - num_tokens - 1
        self.positions = (0, min(DISTANCE, last), last)
        self.different, self.repeated, self.moved = runs[:3], runs[3:6], runs[6]
        shuffled = torch.randperm(min(nested.vocabulary_size, 2**15), generator=torch.Generator().manual_seed(0))
        self.tokens = tuple(shuffled[: num_tokens + 1].tolist())

    def trouble(self) -> str:
        """Runs all forwards, then compares."""
        moving = self._forwards()
        return moving or next(
            (f"{place.name}: {found}" for place in self.places.layers if (found := self._of(place))), ""
        )

    def _forwards(self) -> str:
        repairer = Repairer(self.nested)
        repeated = self.tokens[:1] * self.num_tokens
        runs = []
        for index, position in enumerate(self.positions):
            runs.append(Repair(self.different[index], 0, self.tokens, position))
            runs.append(Repair(self.repeated[index], 0, repeated, position))
        repairer.run(runs, compiled=False)
        found, distance = "", self.positions[1]
        try:
            Mover(self.places).move([Move(self.different[0], 0, self.moved, 0, self.num_tokens, 0, distance)])
        except KVMosaicError as error:
            found = str(error)
        behind = distance + self.num_tokens
        repairer.run([Repair(self.moved, self.num_tokens, self.tokens[-1:], behind)], compiled=False)
        return found

    def _of(self, place: LayerPlace) -> str:
        first, _ = self._read(place, self.different[0])
        if not first.isfinite().all() or not first.any():
            return "what the forward wrote is not found in the cache"
        known = [TOLERANCES[dtype] for dtype in (self.nested.dtype, first.dtype)]
        turned, seen = max(found.turned for found in known), max(found.seen for found in known)
        for index, distance in enumerate(self.positions[1:], 1):
            far = self._rotation_error(place, index, turned)
            if not far <= turned:
                return (
                    f"keys turned from position 0 to {distance} are {far:.2g} of their size away from keys computed "
                    f"there (at most {turned:g}): its rotation was not understood"
                )
            for name, far in self._sight_errors(place, index):
                if not far <= seen:
                    return (
                        f"{name} of tokens at position {distance} are {far:.2g} of their size away from those of the "
                        f"same tokens at position 0 (at most {seen:g}): the model does not only see distances"
                    )
        for where, start, num_tokens in (("of", 0, self.num_tokens), ("of a token behind", self.num_tokens, 1)):
            wanted, moved = (self._read(place, at, start, num_tokens) for at in (self.different[1], self.moved))
            for name, one, other in zip(("keys", "values"), wanted, moved, strict=True):
                if one is not None and other is not None and not (far := _apart(other, one)) <= seen:
                    return (
                        f"{name} {where} a moved run are {far:.2g} of their size away from those of a computed one "
                        f"(at most {seen:g}): its cache was not understood"
                    )
        return ""

    def _rotation_error(self, place: LayerPlace, index: int, threshold: float) -> float:
        """How far keys of a repeated token lie apart after turning, in the dimensions that turn or ought to.

        Nine of ten must agree: a model may have a few dimensions that are many times larger than those they are turned
        with, and whose rounding is all that is left of these.
        """
        still, _ = self._read(place, self.repeated[0])
        wanted, _ = self._read(place, self.repeated[index])
        turned = self._turn(place, still, self.positions[index]).double()
        still, wanted = still.double(), wanted.double()
        size = _size(wanted, 0)
        size = size.clamp(min=0.1 * float(size.median()) + 1e-30)
        error = _size(turned - wanted, 0) / size
        ought = torch.maximum(_size(wanted - still, 0), _size(turned - still, 0)) / size > threshold
        return float(error[ought].quantile(0.9)) if ought.any() else 0.0

    def _sight_errors(self, place: LayerPlace, index: int) -> Iterator[tuple[str, float]]:
        """How far keys and values of different tokens lie apart from those at position 0: they saw the same."""
        keys, values = self._read(place, self.different[0])
        wanted_keys, wanted_values = self._read(place, self.different[index])
        yield "keys", _apart(self._turn(place, keys, self.positions[index]), wanted_keys)
        if values is not None and wanted_values is not None:
            yield "values", _apart(values, wanted_values)

    def _read(
        self, place: LayerPlace, blocks: tuple[int, ...], start: int = 0, num_tokens: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        slots = self.places.slots(blocks, start, num_tokens or self.num_tokens)
        return place.layout.read(slots.to(self.places.device))

    def _turn(self, place: LayerPlace, keys: Tensor, distance: int) -> Tensor:
        """Keys computed from position 0 on, as if computed from `distance` on."""
        keys = keys.clone()
        if place.turning is not None:
            old = torch.arange(len(keys), device=keys.device)
            place.turning.turn(keys, place.turning.factors(old, old + distance, arithmetic(keys.dtype)))
        return keys


def _size(numbers: Tensor, *dims: int) -> Tensor:
    return numbers.square().mean(dims or None).sqrt()


def _apart(numbers: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float(_size(numbers.double() - wanted) / _size(wanted).clamp(min=1e-30))


def _clear(places: Places, runs: list[tuple[int, ...]]) -> None:
    """Leaves zeros, as vLLM's own allocation does."""
    blocks = [block for run in runs for block in run]
    slots = places.slots(blocks, 0, len(blocks) * places.block_size).to(places.device)
    for place in places.layers:
        keys, values = place.layout.read(slots)
        place.layout.write(slots, torch.zeros_like(keys), None if values is None else torch.zeros_like(values))
