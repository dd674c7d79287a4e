"""What the engine needs of a model, of the slots where its keys and values are, and of what runs its steps.

`LoadedModel`, `BlockStorage` and `Runner` are these for transformers, the package `llama` has them for llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvmosaic.attention import PoolName, SpanRows
    from kvmosaic.cache import BlockCopy
    from kvmosaic.cache.block_table import SavedState
    from kvmosaic.layers import LayerGeometry, LayerShape
    from kvmosaic.layout import Layout, LayoutAdapter
    from kvmosaic.memory import ChunkTensors
    from kvmosaic.sampling import Array


class EngineModel(Protocol):
    """Facts of a model. A reason is empty where there is nothing to explain."""

    @property
    def engine_name(self) -> str:
        """What runs it: "transformers", "llama.cpp"."""

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer, or None."""

    @property
    def layers(self) -> Sequence[LayerShape]:
        """What each layer stores and sees."""

    @property
    def vocab_size(self) -> int:
        """Numbers of a row of logits."""

    @property
    def max_positions(self) -> int | None:
        """Positions 0 … max_positions - 1 may be used; None: no limit."""

    @property
    def max_forward_tokens(self) -> int | None:
        """Most tokens of one forward; None: no limit."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    @property
    def device(self) -> torch.device | str:
        """Where logits are."""

    @property
    def fingerprint(self) -> str:
        """Its identity: keys and values are reused by models with the same one only."""

    @property
    def frequency_note(self) -> str:
        """How its rotary frequencies differ from those it was published with."""

    @property
    def adapters(self) -> Mapping[str, LayoutAdapter]:
        """Low-rank adapters by name, the default one first."""

    @property
    def is_movable(self) -> bool:
        """Whether cached tokens can be used at another position."""

    @property
    def immovable_reason(self) -> str:
        """Why cached tokens cannot be used at another position."""

    @property
    def no_window_reason(self) -> str:
        """Why a text cannot have a rolling window."""

    @property
    def no_repair_reason(self) -> str:
        """Why single tokens of a document cannot be computed again."""

    @property
    def state_text(self) -> str:
        """That it carries a state from token to token; empty where it does not."""

    @property
    def repairs_run_by_run(self) -> bool:
        """Whether each run of repaired tokens takes a forward of its own: then names take longer than full reading."""

    @property
    def no_scores_reason(self) -> str:
        """Why attention cannot be measured for a repair."""

    def why_unreadable(self, layout: Layout) -> str:
        """Why a prompt so arranged cannot be read, and the way out; empty when it can."""


class SlotStorage(Protocol):
    """Slots of one pool."""

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """What is stored of a token, layer by layer."""

    @property
    def dtype(self) -> torch.dtype | str:
        """Of what is stored."""

    @property
    def block_size(self) -> int:
        """Slots of a block."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""

    def read_chunk(self, block_ids: Sequence[int], num_tokens: int) -> ChunkTensors:
        """Copies of the first `num_tokens` slots of these blocks; any thread may read blocks that are not written."""

    def get_kv(self, layer_index: int, runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Keys [n, G, D] and values [n, G, Dv] of runs of slots in one layer."""

    def write_chunk(self, block_ids: Sequence[int], chunk: ChunkTensors, *, first_token: int = 0) -> None:
        """Writes a result of `read_chunk`, from some token on, into the first slots of these blocks."""


@runtime_checkable
class StateStorage(Protocol):
    """What documents do to the state of a model, for models whose layers have one."""

    def read_state(self, state: SavedState) -> list[Tensor]:
        """The tensors of a saved state, on the CPU, never to be written to."""

    def write_state(self, tensors: Iterable[Tensor]) -> SavedState:
        """A saved state with copies of a result of `read_state`."""


class StepRunner(Protocol):
    """Runs the rows of a step."""

    @property
    def model(self) -> EngineModel:
        """What it runs."""

    @property
    def storages(self) -> Mapping[PoolName, SlotStorage]:
        """The slots of both pools."""

    @property
    def max_chunk_tokens(self) -> int | None:
        """The most cached tokens that one prompt may read; None: all."""

    @property
    def is_asleep(self) -> bool:
        """Whether the pools hold no device memory."""

    def sleep(self, request_blocks: Sequence[int], chunk_blocks: Sequence[int]) -> None:
        """Frees the pools' device memory; the contents of these blocks move to host memory."""

    def wake(self) -> None:
        """Reallocates the memory, with all contents restored; after a failure it may be retried."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks of the request pool, in order."""

    def run(self, spans: Sequence[SpanRows]) -> Array:
        """Computes and stores the keys and values of rows; returns [R, V] logits, in order, until the next run."""

    def close(self) -> None:
        """Frees what is not freed by itself."""
