"""Repairing: a request's way from the prompt as arranged to the prompt with some tokens of its chunks repaired.

    policy asks for nothing     the layout is repaired at once
    policy asks for signals     chunks (and the question, if attention is asked for) are computed as without repair,
                                signals are measured, the policy chooses, and the request is planned again, repaired

Whatever was computed for measuring is what a request without repair computes, and is cached as that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvmosaic.attention import RunRead
from kvmosaic.errors import InvalidRepair, KVMosaicError
from kvmosaic.layout import UNWEIGHTED, Layout, Weight, exact_spans, repaired
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.repair import ChunkSignals, FullRepair, NoRepair, RepairPolicy, Signal, Temperature, checked_choice
from kvmosaic.sampling import RepairUse

_RunKey = tuple[int, int, int]
"""First slot, number of tokens and distance of a read."""


@dataclass(eq=False, slots=True)
class Repair:
    """What a request repairs, and what is known of its chunks."""

    policy: RepairPolicy
    layout: Layout
    """As arranged, without repair."""
    num_layers: int
    is_measuring: bool = False
    """Whether signals are still to be measured before anything is chosen."""
    shares: dict[int, Tensor] = field(default_factory=dict)
    """By span of a chunk: [m], the attention its tokens got so far, summed over layers."""
    deviations: dict[int, Sequence[float]] = field(default_factory=dict)
    """By span of a chunk: how far its tokens' keys are off."""
    runs: dict[_RunKey, list[tuple[int, int]]] = field(default_factory=dict)
    """The reads of chunks that are watched: which spans they belong to, and where in them they begin."""

    chunks: list[int] = field(init=False)
    """Indexes of the spans of chunks."""
    open_chunks: list[int] = field(init=False)
    """Those that did not see all that stands before them."""

    def __post_init__(self) -> None:
        spans, exact = self.layout.spans, exact_spans(self.layout)
        self.chunks = [index for index, span in enumerate(spans) if span.segment.kind is SegmentKind.CHUNK]
        self.open_chunks = [index for index in self.chunks if index not in exact]

    @property
    def is_full(self) -> bool:
        """Whether the prompt is read as ordinary causal text."""
        return isinstance(self.policy, FullRepair)

    def first_layout(self) -> Layout:
        """What is run first."""
        signals = self.policy.signals
        if not signals or not self.open_chunks:
            return self.repaired_layout()
        self.is_measuring = True
        if "attention" in signals:
            return self.layout
        return Layout(self.layout.spans[:-1], self.layout.strategy, self.layout.chunk_context)

    def repaired_layout(self) -> Layout:
        """What answers the request.

        Raises:
            InvalidRepair: the policy failed, or chose tokens that do not exist.
        """
        self.is_measuring = False
        weight = _weight_of(self.policy)
        chunks, open_chunks = self.chunks, set(self.open_chunks)
        known = [
            ChunkSignals(
                self.layout.spans[index].num_tokens,
                index not in open_chunks,
                self.deviations.get(index, [0.0] * self.layout.spans[index].num_tokens if self.deviations else ()),
                self.shares[index].tolist() if index in self.shares else (),
            )
            for index in chunks
        ]
        try:
            chosen = checked_choice(known, self.policy.choose(known), self.policy)
        except KVMosaicError:
            raise
        except Exception as error:
            raise InvalidRepair(f"the repair policy {self.policy} failed: {error}") from error
        return repaired(self.layout, dict(zip(chunks, chosen, strict=True)), weight)

    def see(self, layer_index: int, read: RunRead, shares: Tensor) -> None:
        """See `kvmosaic.attention.Watch`."""
        for index, first in self.runs[read.first_slot, read.num_tokens, read.distance]:
            total = self.shares.get(index)
            if total is None:
                total = self.shares[index] = shares.new_zeros(self.layout.spans[index].num_tokens)
            total[first : first + read.num_tokens] += shares / self.num_layers

    def use(self, layout: Layout, num_found: int, seconds: float) -> RepairUse:
        """What was repaired, and what that cost.

        Args:
            layout: the one that answers.
            num_found: repaired tokens, or all of the prompt, that were found in the prefix cache.
            seconds: spent on choosing and repairing.
        """
        num_tokens = sum(self.layout.spans[index].num_tokens for index in self.chunks)
        num_repaired = 0
        if self.is_full:  # what was found began with the system text
            num_repaired = num_tokens
            before = sum(span.num_tokens for span in self.layout.spans[: self.chunks[0]])
            num_found = min(max(num_found - before, 0), num_tokens)
        if (index := layout.repair) is not None:
            num_repaired = layout.spans[index].num_tokens
        num_computed = num_repaired - num_found
        work = num_computed * self.num_layers
        if self.open_chunks:
            if "deviation" in self.policy.signals:
                work += sum(self.layout.spans[index].num_tokens for index in self.open_chunks)
            if "attention" in self.policy.signals:
                work += self.layout.last.num_tokens * self.num_layers
        return RepairUse(
            policy=str(self.policy),
            document_tokens=num_tokens,
            repaired_tokens=num_repaired,
            computed_tokens=num_computed,
            work_fraction=work / (num_tokens * self.num_layers),
            milliseconds=seconds * 1e3,
        )


def repair_of(policy: RepairPolicy, layout: Layout, model: LoadedModel, *, has_window: bool) -> Repair | None:
    """How a request is repaired; None if there is nothing to do.

    Raises:
        InvalidRepair: the policy does not suit the model, or the request.
    """
    if isinstance(policy, NoRepair) or all(span.segment.kind is not SegmentKind.CHUNK for span in layout.spans):
        return None
    check_model(policy, model)
    if has_window and not isinstance(policy, FullRepair):
        raise InvalidRepair(
            f"repair={policy} keeps some tokens of documents apart, and window_tokens moves documents along with the "
            "text; use repair='none' or 'full', or leave window_tokens out"
        )
    return Repair(policy, layout, len(model.layers))


def check_model(policy: RepairPolicy, model: LoadedModel) -> None:
    """Raises InvalidRepair if a model cannot be repaired in this way."""
    if isinstance(policy, NoRepair | FullRepair):
        return
    biased = next((layer.index for layer in model.layers if layer.bias is not None), None)
    if biased is not None and not isinstance(policy, Temperature):
        raise InvalidRepair(
            f"repair={policy} computes tokens that do not stand behind each other, and layer {biased} of this model "
            "adds a bias by distance, which is only done for neighbours; use repair='none', 'full' or "
            "'temperature(t, scale)'"
        )
    needed: frozenset[Signal] = policy.signals
    if "deviation" in needed and len(model.layers) < 2:
        raise InvalidRepair(
            f"repair={policy} compares keys of the second layer, and this model has {len(model.layers)}; "
            "use 'first(k)' or 'query(fraction)'"
        )


def joined(prompt: Prompt) -> Prompt:
    """The same tokens as one ordinary prompt, read causally."""
    token_ids = tuple(token for segment in prompt.segments for token in segment.token_ids or ())
    segment = Segment(SegmentKind.PLAIN, token_ids, text=prompt.text)
    return Prompt((segment,), prompt.salt, prompt.tenant)


def _weight_of(policy: RepairPolicy) -> Weight:
    if not isinstance(policy, Temperature):
        return UNWEIGHTED
    return Weight(1 / policy.temperature, math.log(policy.scale))
