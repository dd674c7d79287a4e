"""Runner: one forward of an unmodified transformers model over rows of many spans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from kvmosaic.attention import (
    AttentionBackend,
    PoolName,
    RowGroup,
    SpanRows,
    StepAttention,
    TorchBackend,
    Write,
)
from kvmosaic.attention.step import Choice
from kvmosaic.cache import BlockCopy
from kvmosaic.cache.block_table import SavedState
from kvmosaic.errors import ModelError
from kvmosaic.layers import AttentionCall
from kvmosaic.memory import BlockStorage
from kvmosaic.model.hook import Receiver
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.lora import AdaptedRows, adapter_scope
from kvmosaic.model.states import Mixer
from kvmosaic.model.step_states import StepStates
from kvmosaic.rope import TableCache

if TYPE_CHECKING:
    from kvmosaic.model.step_graphs import StepGraphs


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward as tensors: T tokens of any number of spans, R rows that need logits."""

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    groups: tuple[RowGroup, ...]
    writes: tuple[Write, ...]
    adapted: tuple[AdaptedRows, ...] = ()
    spans: tuple[SpanRows, ...] = ()


def flatten(spans: Sequence[SpanRows], device: torch.device, *, writes: bool = True) -> Batch:
    """Concatenates the rows of all spans; without `writes`, their keys and values are not stored."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    groups: list[RowGroup] = []
    written: dict[PoolName, tuple[list[int], list[int]]] = {}
    adapted: list[AdaptedRows] = []
    for span in spans:
        first, count = len(token_ids), len(span.token_ids)
        token_ids.extend(span.token_ids)
        positions.extend(span.rules.positions or range(span.position, span.position + count))
        groups.append(RowGroup(first, count, span.position, span.reads, span.reads_itself, span.rules))
        if span.adapter and adapted and adapted[-1].digest == span.adapter and adapted[-1].rows.stop == first:
            adapted[-1] = AdaptedRows(span.adapter, slice(adapted[-1].rows.start, first + count))
        elif span.adapter:
            adapted.append(AdaptedRows(span.adapter, slice(first, first + count)))
        rows, slots = written.setdefault(span.pool, ([], []))
        rows.extend(range(first, first + count))
        slots.extend(span.slots)
        logit_rows.extend(range(len(token_ids) - span.num_logits, len(token_ids)))
    return Batch(
        torch.tensor(token_ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(logit_rows, dtype=torch.long, device=device),
        tuple(groups),
        tuple(
            Write(pool, _slice_or_index(rows, device), _slice_or_index(slots, device))
            for pool, (rows, slots) in written.items()
            if writes
        ),
        tuple(adapted),
        tuple(spans),
    )


def _slice_or_index(numbers: list[int], device: torch.device) -> Tensor | slice:
    """A slice if the numbers are consecutive, which avoids a scatter."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers, device=device)


class Runner:
    """Owns the block tensors of both pools and runs steps on them."""

    max_chunk_tokens = None

    def __init__(
        self,
        model: LoadedModel,
        num_blocks: Mapping[PoolName, int],
        block_size: int,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.model = model
        self.backend = backend or TorchBackend()
        self.storages: dict[PoolName, BlockStorage] = {
            pool: BlockStorage(model.layers, count, block_size, model.dtype, model.device)
            for pool, count in num_blocks.items()
        }
        self.graphs: StepGraphs | None = None
        """What replays steps of few rows, where there is one."""
        self._table_cache = TableCache()
        self._saved_states: WeakSet[SavedState] = WeakSet()
        """States that something still refers to."""

    @property
    def is_asleep(self) -> bool:
        """Whether the pools hold no device memory."""
        return any(storage.is_asleep for storage in self.storages.values())

    def sleep(self, request_blocks: Sequence[int], chunk_blocks: Sequence[int]) -> None:
        """Frees the pools' device memory; the contents of these blocks move to host memory."""
        if self.graphs is not None:
            self.graphs.clear()
        kept: Mapping[PoolName, Sequence[int]] = {"request": request_blocks, "chunk_cache": chunk_blocks}
        for pool, storage in self.storages.items():
            storage.sleep(kept[pool])
        self._move_states(torch.device("cpu"))
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Reallocates the memory, with all contents restored; after a failure it may be retried."""
        for storage in self.storages.values():
            storage.wake()
        self._move_states(self.model.device)

    def _move_states(self, device: torch.device) -> None:
        for state in self._saved_states:
            state.value = [part.to(device) for part in state.value]

    def read_state(self, state: SavedState) -> list[Tensor]:
        """What is kept of a document's states, on the CPU; nothing changes these tensors."""
        parts = [*state.value, *(state.rest.value if state.rest is not None else ())]
        return [tensor.to("cpu") for part in parts for tensor in part.tensors()]

    def write_state(self, tensors: Iterable[Tensor]) -> SavedState:
        """Copies a result of `read_state` to the device."""
        copies = iter([tensor.to(self.model.device, copy=True) for tensor in tensors])
        state = SavedState(has_map=True)
        state.value = [layer.map_of(copies) for layer in self.model.state_layers]
        if rest := list(copies):
            state.rest = self.write_state(rest)
        self._saved_states.add(state)
        return state

    def close(self) -> None:
        """Nothing to do: torch frees its memory."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks of the request pool, in order: the target of one may be the source of a later one."""
        for copy in copies:
            self.storages["request"].copy_block(copy.source, copy.target)

    def keys_of(self, spans: Sequence[SpanRows], layer_index: int) -> Tensor:
        """Keys [T, G, D] of rows in one layer, rotated at their positions; later layers are not computed.

        Nothing is stored: rows of a span read each other causally from what the forward itself computes.
        """
        batch = flatten(spans, self.model.device, writes=False)
        stop = _StopAt(self._attention(batch), layer_index)
        with contextlib.suppress(_Stopped), adapter_scope(batch.adapted):
            self.model.forward(batch.token_ids, batch.positions, batch.logit_rows, stop)
        assert stop.key is not None, "every layer calls its attention"
        return stop.key

    def run(self, spans: Sequence[SpanRows]) -> Tensor:
        """Computes the keys and values of all given rows and stores them.

        Args:
            spans: the rows; spans may be listed in any order, also after spans that read them.

        Returns:
            [R, V] logits in float32 (float64 for float64 models), of the requested rows of every span, in order.

        Raises:
            ModelError: a layer did not call our attention, so that it read no cached token.
        """
        if self.graphs is not None and (logits := self.graphs.run(spans)) is not None:
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        batch = flatten(spans, self.model.device)
        attention = self._attention(batch)
        states = StepStates(len(self.model.state_layers), spans) if self.model.state_layers else None
        logits = self._forward(batch, attention, states)
        if attention.num_calls != len(self.model.layers):
            raise ModelError(
                f"{type(self.model.module).__name__} called our attention in {attention.num_calls} of "
                f"{len(self.model.layers)} layers, so cached tokens were not read in the others; was its attention "
                "implementation changed after loading? Load the model again, or take a new LoadedModel.from_module"
            )
        if states is not None:
            if states.num_calls != len(self.model.state_layers):
                raise ModelError(
                    f"{type(self.model.module).__name__} called {states.num_calls} of {len(self.model.state_layers)} "
                    "layers with a state; take a new LoadedModel.from_module"
                )
            states.keep()
            self._saved_states.update(states.saved)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _forward(self, batch: Batch, receiver: Receiver, mixer: Mixer | None = None) -> Tensor:
        """[R, V] logits of one forward, in the model's dtype."""
        with adapter_scope(batch.adapted):
            return self.model.forward(batch.token_ids, batch.positions, batch.logit_rows, receiver, mixer)

    def _attention(self, batch: Batch) -> StepAttention:
        return StepAttention(
            self.model.layers, self.storages, batch.groups, batch.writes, self.backend, self._table_cache
        )


class _Stopped(Exception):
    """Ends a forward early."""


class _StopAt:
    """A receiver that ends the forward at one layer."""

    def __init__(self, receiver: StepAttention, layer_index: int) -> None:
        self._receiver = receiver
        self._layer_index = layer_index
        self.key: Tensor | None = None

    def __call__(self, call: AttentionCall) -> Tensor | Choice:
        """Computes attention of the layers before; at the layer itself, keeps the keys and ends the forward."""
        if call.layer_index == self._layer_index:
            self.key = call.key
            raise _Stopped
        return self._receiver(call)
