"""Fused attention module: an attention module of transformers that rotates queries and keys in one call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.layers import AttentionCall
from kvmosaic.model.cpu.fused import Fused, output, own_output, suits
from kvmosaic.model.cpu.row_kernels import RowKernels, TurnPlan, num_threads
from kvmosaic.model.hook import ATTENTION_NAME, Receiver, current_receiver


@dataclass(frozen=True, slots=True)
class CallConstants:
    """Constant arguments of an attention module to its attention function."""

    scaling: float
    softcap: float | None
    window: int | None
    sinks: str | None
    """Name of the parameter."""


class FusedAttention(Fused):
    """An attention module: projections, one call that rotates queries and keys, the receiver, the output projection."""

    kind = "attention modules"

    def __init__(
        self,
        module: nn.Module,
        kernels: RowKernels,
        shape: tuple[int, int, int],
        turn: TurnPlan | None,
        constants: CallConstants,
    ) -> None:
        """`shape`: query heads, key heads, head size; `turn`: None if nothing is rotated."""
        super().__init__(module)
        self._shape = shape
        self._turn = kernels.turn
        self._plan = turn
        self._address = None if turn is None else ctypes.addressof(turn)
        self._table_dim = 0 if turn is None else turn.table_dim
        self._constants = constants

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, None]:
        """Hidden states [1, T, hidden] -> [1, T, hidden], and no weights."""
        x = arguments[0] if arguments else named.get("hidden_states")
        receiver = current_receiver()
        if receiver is None or len(arguments) > 1 or not suits(x) or not self.can_apply(x, named):
            own: tuple[Tensor, None] = self.own_code(*arguments, **named)
            return own
        return self.apply(x, receiver, named), None

    def can_apply(self, x: Tensor, named: dict[str, Any]) -> bool:
        """Whether a call with these arguments is supported: no cache of transformers, tables for every row."""
        module: Any = self.module
        if named.get("past_key_values") is not None or module.config._attn_implementation != ATTENTION_NAME:
            return False
        if self._plan is None:
            return x.shape[0] == 1
        tables = named.get("position_embeddings")
        if not isinstance(tables, tuple) or len(tables) != 2:
            return False
        cos, sin = tables
        return suits(cos) and suits(sin) and cos.shape == sin.shape == (1, x.shape[1], self._table_dim)

    def apply(self, x: Tensor, receiver: Receiver, named: dict[str, Any]) -> Tensor:
        """Supported hidden states, [1, T, hidden] -> [1, T, hidden]."""
        module: Any = self.module
        query, key, value = self.project(x, named.get("position_embeddings"))
        constants = self._constants
        sinks = None if constants.sinks is None else module._parameters[constants.sinks]
        mask = named.get("attention_mask")
        scaling, softcap, window = constants.scaling, constants.softcap, constants.window
        call = AttentionCall(module.layer_idx, query, key, value, scaling, softcap, sinks, module, mask, window)
        attended = receiver(call)
        if attended.dtype is not torch.bfloat16:
            attended = attended.to(torch.bfloat16)
        return output(module._modules["o_proj"], attended.reshape(1, attended.shape[0], -1))

    def project(self, x: Tensor, tables: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys [T, G, D] and values [T, G, Dv] of [1, T, hidden]."""
        parts: Any = self.module._modules
        num_heads, num_kv_heads, head_dim = self._shape
        num_rows = x.shape[1]
        query, key = own_output(parts["q_proj"], x), own_output(parts["k_proj"], x)
        value = output(parts["v_proj"], x)
        if "q_norm" in parts:
            query, key = _normed(parts["q_norm"], query), _normed(parts["k_norm"], key)
        if self._address is not None:
            cos, sin = tables
            self._turn(
                self._address,
                query.data_ptr(),
                key.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                num_rows,
                num_threads(num_rows),
            )
        return (
            query.view(num_rows, num_heads, head_dim),
            key.view(num_rows, num_kv_heads, head_dim),
            value.view(num_rows, num_kv_heads, -1),
        )


def _normed(norm: Any, x: Tensor) -> Tensor:
    """A norm over each head, or over all of them, by the size of its weight."""
    return own_output(norm, x.view(*x.shape[:-1], -1, norm.weight.numel()))
