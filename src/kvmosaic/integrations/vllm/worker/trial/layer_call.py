"""Layer call: a layer of the model, called again with its recorded arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from kvmosaic.integrations.vllm.operations import RepairedRun
from kvmosaic.integrations.vllm.worker.extra_forward import ExtraForward
from kvmosaic.integrations.vllm.worker.trial.rounding_limits import perturbed


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
