"""Layer trial: one layer of the model, called again with its recorded inputs and checked on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from kvmosaic.errors import KVMosaicError
from kvmosaic.vllm.operations import RepairedRun
from kvmosaic.vllm.worker.extra_forward import ExtraForward
from kvmosaic.vllm.worker.kv_layout import KVLayout, LayerPlace, Mover
from kvmosaic.vllm.worker.trial.attention import Attended, AttentionRecorder, attention_error
from kvmosaic.vllm.worker.trial.plan import TrialPlan
from kvmosaic.vllm.worker.trial.rotation import (
    allowed,
    apart,
    fitted,
    misunderstood,
    noise_ratio,
    perturbed,
    turned,
    unit,
)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Recorded arguments of one module in a forward of T tokens.

    Every argument with T rows is of these tokens; one of them is their positions. The same rows with other positions,
    or some rows alone, are what the module would get if the tokens were at other positions, or were computed later.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: Tensor
    expert_layer: int
    """vLLM counts the layers of experts in a forward, and finds their weights by that number."""

    @classmethod
    def of(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], positions: Tensor
    ) -> RecordedCall | None:
        """Copies the arguments; None if the module takes no positions, or numbers of other tokens than these."""
        from vllm.forward_context import get_forward_context

        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(_is_positions(each, positions) for each in tensors):
            return None
        if any(each.is_floating_point() and each.dim() > 1 and len(each) != len(positions) for each in tensors):
            return None
        args, kwargs = tree_map(lambda each: _copied(each, len(positions)), (args, kwargs))
        return cls(module, args, kwargs, positions.clone(), getattr(get_forward_context(), "moe_layer_index", 0))

    @property
    def inputs(self) -> list[Tensor]:
        """Its floating-point arguments with a row for each token."""
        return [each for each in tree_leaves((self.args, self.kwargs)) if _is_numbers(each, len(self.positions))]

    def again(
        self, nested: ExtraForward, runs: list[RepairedRun], tokens: list[int], *, noisy: bool = False
    ) -> list[Tensor]:
        """Calls it with the rows of these tokens, at the positions of these runs and with their blocks.

        Args:
            nested: builds the attention metadata.
            runs: as many tokens as `tokens` together.
            tokens: tokens of the recorded forward.
            noisy: every floating-point number is off by about one rounding.

        Returns:
            Its output, with a row for each token.
        """
        from vllm.forward_context import get_forward_context

        with nested.step(runs, compiled=False) as rows:
            index = torch.tensor(tokens, device=rows.positions.device)

            def taken(each: Any) -> Any:
                if not _is_rows(each, len(self.positions)):
                    return each
                if _is_positions(each, self.positions):
                    return rows.positions.to(each.dtype)
                return perturbed(each[index]) if noisy and each.is_floating_point() else each[index]

            args, kwargs = tree_map(taken, (self.args, self.kwargs))
            running = get_forward_context()
            if hasattr(running, "moe_layer_index"):
                running.moe_layer_index = self.expert_layer
            return outputs(self.module(*args, **kwargs), len(tokens))


def outputs(given: Any, num_tokens: int) -> list[Tensor]:
    """Copies of a module's output tensors that have a row for each token."""
    return [each.clone() for each in tree_leaves(given) if _is_numbers(each, num_tokens)]


def _is_rows(each: Any, num_tokens: int) -> bool:
    return isinstance(each, Tensor) and bool(each.dim()) and len(each) == num_tokens


def _is_numbers(each: Any, num_tokens: int) -> bool:
    return _is_rows(each, num_tokens) and bool(each.is_floating_point())


def _is_positions(each: Tensor, positions: Tensor) -> bool:
    is_whole = each.dtype in (torch.int64, torch.int32)
    return is_whole and each.shape == positions.shape and bool((each == positions).all())


def _copied(each: Any, num_tokens: int) -> Any:
    return each.clone() if _is_rows(each, num_tokens) else each


SAME = 0.5
"""Max error of a layer's output for equal rows of one batch, in multiples of the noise of one rounding of its input."""
LATER = 2.0
"""The same for tokens that are computed in another batch, with the rest in the cache."""


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """Outputs of one layer for the runs of a plan.

    Its input is from one forward over ordinary text. The same rows are passed to it again: at other positions, and
    some of them alone, later. So nothing here depends on how earlier layers amplify rounding.
    """

    places: KVLayout
    nested: ExtraForward
    plan: TrialPlan
    recorder: AttentionRecorder

    def trouble(self, call: RecordedCall, given: list[Tensor], names: tuple[str, ...]) -> str:
        """The defect of a layer; empty: none. Runs the same forwards whatever it finds.

        Args:
            call: the call of the plan's whole text, made just now.
            given: its output.
            names: names of the attention layers in it.
        """
        layers = [place for place in self.places.layers if place.name in names]
        whole = [(place, self.plan.text_run, self.recorder.calls[place.name]) for place in layers]
        found = list(self._heads(call, layers))
        found += [self._attended(*each) for each in whole]
        found.append(self._behind(call, layers))
        found.append(self._tail(call, given, layers))
        return next(filter(None, found), "")

    # At other positions

    def _heads(self, call: RecordedCall, layers: list[LayerPlace]) -> Iterator[str]:
        plan, head = self.plan, self.plan.head
        for runs in plan.head_runs():
            still: dict[str, Attended] = {}

            def same(name: str, output: Tensor, still: dict[str, Attended] = still) -> Tensor:
                """Replaces attention outputs by the ones at position 0: the runs may have other tokens before them."""
                first = still.setdefault(name, self.recorder.calls[name].of(slice(head))).output
                return first.repeat(len(output) // head, 1, 1).reshape(output.shape)

            self.recorder.replaced = same
            outputs = call.again(self.nested, runs, list(range(head)) * len(runs))
            calls = dict(self.recorder.calls)
            elsewhere = replace(runs[0], blocks=plan.moved_blocks)
            noisy = call.again(self.nested, [elsewhere], list(range(head)), noisy=True)
            self.recorder.replaced = None
            for number, run in enumerate(runs):
                rows = slice(number * head, (number + 1) * head)
                for place in layers:
                    yield self._head(place, run, still[place.name], calls[place.name].of(rows))
                if number:
                    yield self._rest(layers, run, [each[rows] for each in outputs], [x[:head] for x in outputs], noisy)

    def _head(self, place: LayerPlace, run: RepairedRun, still: Attended, seen: Attended) -> str:
        if run.position and (found := self._turned(place, run, still, seen)):
            return found
        if found := self._attended(place, run, seen):
            return found
        return self._moved(place, run) if run.position else ""

    def _turned(self, place: LayerPlace, run: RepairedRun, still: Attended, seen: Attended) -> str:
        """Checks that keys and queries rotate, and values do not."""
        most = allowed(self.nested.dtype, seen.keys.dtype)
        for name, old, new in (("keys", still.keys, seen.keys), ("queries", still.queries, seen.queries)):
            rotation = fitted(place.rotation, place, new.shape[-1])
            far = apart(rotation, turned(rotation, old, 0, run.position), new)
            if not far <= most:
                return f"{place.name}: {misunderstood(name, 0, run.position, far, most)}"
        if seen.values is not None and still.values is not None:
            far = apart(None, still.values, seen.values)
            if not far <= most:
                return (
                    f"{place.name}: values of tokens at position {run.position} are {far:.2g} of their size away from "
                    f"those at position 0 (at most {most:.2g}): the model does not only see distances"
                )
        return ""

    def _moved(self, place: LayerPlace, run: RepairedRun) -> str:
        """Compares keys and values moved to another head's position with those computed there."""
        if trouble := self._move(place, run):
            return trouble
        computed = self._read(place, run.blocks, run.start)
        moved = self._read(place, self.plan.moved_blocks, run.start % self.plan.block_size)
        most = 1.5 * allowed(self.nested.dtype, place.kept(moved[0].dtype))  # it is rounded once more
        for name, one, other, rotation in zip(("keys", "values"), moved, computed, (place.rotation, None), strict=True):
            if one is not None and other is not None and not (far := apart(rotation, one, other)) <= most:
                return (
                    f"{place.name}: {name} moved to position {run.position} are {far:.2g} of their size away from "
                    f"those computed there (at most {most:.2g}): its cache was not understood"
                )
        return ""

    def _move(self, place: LayerPlace, run: RepairedRun) -> str:
        try:
            Mover(replace(self.places, layers=(place,))).move([self.plan.move_to(run)])
        except KVMosaicError as error:
            return f"{place.name}: {error}"
        return ""

    def _behind(self, call: RecordedCall, layers: list[LayerPlace]) -> str:
        """Checks that a token after a moved head attends to the moved keys."""
        run = self.plan.moved_head
        trouble = next(filter(None, [self._move(place, run) for place in layers]), "")
        call.again(self.nested, [self.plan.behind(run)], [self.plan.head % len(self.plan.tokens)])
        if trouble:
            return trouble
        seen = ((place, self.recorder.calls[place.name]) for place in layers)
        return next(filter(None, (self._of_softmax(place, self.plan.behind(run), each) for place, each in seen)), "")

    # Inputs, cache contents and outputs

    def _attended(self, place: LayerPlace, run: RepairedRun, seen: Attended) -> str:
        """Checks that the cache holds the inputs of attention, and that attention's output follows from the cache."""
        stored = self._read(place, run.blocks, run.start, len(run.token_ids))
        how = place.layout.quantization
        for which, (one, other) in enumerate(zip(stored, (seen.keys, seen.values), strict=True)):
            if one is None or other is None:
                continue
            name = ("keys", "values")[which]
            if not other.isfinite().all() or not other.any():
                return f"{place.name}: its {name} are not finite, or all zero"
            most, least = 2 * unit(one.dtype, other.dtype), 0.0
            if how is not None:  # the nearest number in eight bits, or one beside it
                other = how.numbers(how.codes(other, which), which)
                most, least = 2 * unit(how.format), how.smallest(which)
            if (
                one.shape != other.shape
                or not (one.double() - other.double()).abs().le(most * other.abs() + least).all()
            ):
                return f"{place.name}: the {name} that it wrote are not found there: its cache was not understood"
        return self._of_softmax(place, run, seen)

    def _of_softmax(self, place: LayerPlace, run: RepairedRun, seen: Attended) -> str:
        far = attention_error(self.places, place, run, seen)
        if not far <= 1:
            return (
                f"{place.name}: attention at positions {run.position} to {run.position + len(run.token_ids) - 1}, over "
                f"{run.start + len(run.token_ids)} tokens, is {far:.2g} times as far from a softmax over all of them "
                "as rounding explains: it sees other tokens, or weighs them by more than queries and keys"
            )
        return ""

    def _tail(self, call: RecordedCall, given: list[Tensor], layers: list[LayerPlace]) -> str:
        """Compares tokens computed later, with the others in the cache, with the same tokens computed among them."""
        run = self.plan.tail_run
        tokens = list(range(self.plan.tail, len(self.plan.tokens)))
        noisy = call.again(self.nested, [run], tokens, noisy=True)
        later = call.again(self.nested, [run], tokens)
        wanted = [each[self.plan.tail :] for each in given]
        for place in layers:
            if found := self._of_softmax(place, run, self.recorder.calls[place.name]):
                return found
        far = noise_ratio(later, wanted, noisy)
        if not far <= LATER:
            return (
                f"{layers[0].name}: the layer gives something else for tokens that are computed with {self.plan.tail} "
                f"others in the cache than for the same tokens in one forward ({far:.2g} times what one rounding of "
                "its input changes): it also uses tokens that it does not attend to"
            )
        return ""

    def _rest(
        self, layers: list[LayerPlace], run: RepairedRun, found: list[Tensor], wanted: list[Tensor], noisy: list[Tensor]
    ) -> str:
        far = noise_ratio(found, wanted, noisy)
        if far <= SAME:
            return ""
        return (
            f"{layers[0].name}: after its attention the layer gives something else at position {run.position} than "
            f"at position 0 ({far:.2g} times what one rounding of its input changes): the model does not only see "
            "distances"
        )

    def _read(
        self, place: LayerPlace, blocks: tuple[int, ...], start: int, num_tokens: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        slots = self.places.slots(blocks, start, num_tokens or self.plan.head)
        return place.layout.read(slots.to(self.places.device))
