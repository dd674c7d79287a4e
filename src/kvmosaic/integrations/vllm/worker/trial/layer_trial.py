"""Layer trial: one layer of the model, checked on its inputs in a forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from kvmosaic.errors import KVMosaicError
from kvmosaic.integrations.vllm.operations import RepairedRun
from kvmosaic.integrations.vllm.worker.extra_forward import ExtraForward
from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout, LayerPlace
from kvmosaic.integrations.vllm.worker.mover import Mover
from kvmosaic.integrations.vllm.worker.trial.attention import Attended, AttentionRecorder, attention_error
from kvmosaic.integrations.vllm.worker.trial.layer_call import RecordedCall
from kvmosaic.integrations.vllm.worker.trial.plan import TrialPlan
from kvmosaic.integrations.vllm.worker.trial.rotation import allowed, apart, fitted, misunderstood, turned
from kvmosaic.integrations.vllm.worker.trial.rounding_limits import noise_ratio, unit

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
        most = 1.5 * allowed(self.nested.dtype, moved[0].dtype)  # it is rounded once more
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
        for name, one, other in zip(("keys", "values"), stored, (seen.keys, seen.values), strict=True):
            if one is None or other is None:
                continue
            if not other.isfinite().all() or not other.any():
                return f"{place.name}: its {name} are not finite, or all zero"
            most = 2 * unit(one.dtype, other.dtype)
            if one.shape != other.shape or not (one.double() - other.double()).abs().le(most * other.abs()).all():
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
