"""Position shift: in some steps, tokens have lower positions than their index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.vllm.operations import ShiftedTokens, layer_specs
from kvmosaic.vllm.worker.layouts.ascend import is_npu


class StepPositions:
    """Changes the positions that a module is called with, between `begin` and `end`; only then it has hooks."""

    def __init__(self, root_module: nn.Module) -> None:
        """Takes the module that vLLM's runner calls with `positions`, [T] or [3, T].

        The given tensor is changed, and restored after the forward: captured graphs read that tensor, no copy of it.
        """
        self._root = root_module
        self._hooks: list[Any] = []
        self._changed: tuple[Tensor, Tensor] | None = None

    def begin(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """From now on a forward gets what `change(positions, slots)` returns."""

        def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            slots = step_slots()
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            if slots is not None and positions is not None:
                changed, self._changed = change(positions, slots), (positions, positions.clone())
                positions.copy_(changed)

        self._hooks.append(self._root.register_forward_pre_hook(prepare, with_kwargs=True))
        # who has changed them last restores them first
        self._hooks.append(self._root.register_forward_hook(self._restore, always_call=True, prepend=True))

    def end(self) -> None:
        """Ends the step; safe at any time."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _restore(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._changed is not None:
            positions, given = self._changed
            positions.copy_(given)
            self._changed = None


class PositionShift:
    """Lowers the positions passed to the model, for tokens whose keys and values go into shifted blocks.

    index (vLLM's)      │ 0 1 2 │ 3 4 5 │ 6 7 8 │ 9 10        blocks of a request, 3 tokens each
    ShiftedTokens(blocks 2 3, distance 3)
    position            │ 0 1 2 │ 3 4 5 │ 3 4 5 │ 6 7
    """

    def __init__(self, root_module: nn.Module, block_size: int) -> None:
        """Takes the module that vLLM's runner calls, and the tokens of the scheduler's blocks; see `StepPositions`."""
        self._positions = StepPositions(root_module)
        self._block_size = block_size
        self._blocks = self._distances = torch.empty(0, dtype=torch.int64)

    def begin(self, shifts: Sequence[ShiftedTokens]) -> None:
        """Shifts all forwards from now on. With no shifts, nothing happens."""
        self.end()
        distances = {block: shift.distance for shift in shifts for block in shift.blocks if shift.distance}
        if not distances:
            return
        assert min(distances.values()) > 0, "tokens are only ever shifted to earlier positions"
        blocks = sorted(distances)
        self._blocks = torch.tensor(blocks, dtype=torch.int64)
        self._distances = torch.tensor([distances[block] for block in blocks], dtype=torch.int64)
        self._positions.begin(self._lowered)

    def end(self) -> None:
        """Ends the step; safe at any time."""
        self._positions.end()

    def _lowered(self, positions: Tensor, slots: Tensor) -> Tensor:
        distances = self._distances_of(slots[: positions.shape[-1]])
        lowered = positions.clone()
        lowered[..., : len(distances)].sub_(distances).clamp_(min=0)
        return lowered

    def _distances_of(self, slots: Tensor) -> Tensor:
        """[T]: the shift of each token; 0 for padding, whose slot is negative and so in no block."""
        blocks, distances = self._blocks.to(slots.device), self._distances.to(slots.device)
        block = slots.to(torch.int64).div(self._block_size, rounding_mode="floor")
        nearest = torch.searchsorted(blocks, block).clamp(max=len(blocks) - 1)
        return torch.where(blocks[nearest] == block, distances[nearest], 0)


def step_slots() -> Tensor | None:
    """[T]: slots of the tokens of the current forward; None if unknown.

    vLLM keeps them beside the attention metadata, older versions inside it.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return None
    running = get_forward_context()
    by_layer = getattr(running, "slot_mapping", None)
    if isinstance(by_layer, dict) and by_layer:
        return next(iter(by_layer.values()))  # type: ignore[no-any-return]
    if isinstance(running.attn_metadata, dict):
        for metadata in running.attn_metadata.values():
            if isinstance(found := getattr(metadata, "slot_mapping", None), Tensor):
                return found
    return None


def num_rows_of_step() -> int | None:
    """Rows of the current forward without padding, whose slots are known; None if their number is not."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata or {}
    return next((getattr(each, "num_actual_tokens", None) for each in metadata.values()), None)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Context in which the pieces of a model are launched, and none of them is a graph."""
    from vllm.forward_context import get_forward_context

    running = get_forward_context()
    mode = running.cudagraph_runtime_mode
    before = {"cudagraph_runtime_mode": mode, "moe_layer_index": getattr(running, "moe_layer_index", 0)}
    vars(running).update(cudagraph_runtime_mode=type(mode).NONE, moe_layer_index=0)  # experts' layers count their calls
    try:
        yield
    finally:
        vars(running).update(before)


def can_shift(vllm_config: Any, kv_cache_config: Any, root_module: nn.Module, *, by_vllm: bool = True) -> str:
    """Why positions cannot be shifted under this configuration; empty: they can.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: that of its cache.
        root_module: the model, called with positions.
        by_vllm: whether vLLM's kernel computes the attention of shifted rows; if not, ours does, where rows read in
            place.
    """
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    mode = vllm_config.compilation_config.cudagraph_mode
    reasons = {
        f"{len(groups)} groups of layers with blocks of their own": len(groups) != 1,
        "layers with windows count the tokens that they see, not positions": by_vllm
        and any(getattr(spec, "sliding_window", None) for group in groups for spec in layer_specs(group)),
        'full CUDA graphs call no module: start with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'': (
            mode is not None and mode.has_full_cudagraphs()
        ),
        "CUDA graphs of the whole model (VLLM_USE_BREAKABLE_CUDAGRAPH)": _breakable_graphs(),
        "the model's root module has no forward hooks": type(root_module).__call__ is not nn.Module.__call__,
        "vLLM-Ascend: its runner looks up angles before the model is called": is_npu(vllm_config),
        "two half batches at once (--enable-dbo)": getattr(parallel, "use_ubatching", False),
        "prefill context parallel": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "decode context parallel": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def may_replay(vllm_config: Any) -> bool:
    """Whether a whole forward may be captured: graphs are not turned off, and one worker computes it, without LoRA."""
    mode, parallel = vllm_config.compilation_config.cudagraph_mode, vllm_config.parallel_config
    is_alone = parallel.world_size == 1 and getattr(parallel, "data_parallel_size", 1) == 1
    return mode is not None and mode.has_piecewise_cudagraphs() and is_alone and vllm_config.lora_config is None


def _breakable_graphs() -> bool:
    try:
        from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    except ImportError:  # older versions have no such graphs
        return False
    return bool(is_breakable_cudagraph_enabled())
