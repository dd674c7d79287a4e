"""Attention adapters, for models whose attention is inside its module and not called through `AttentionInterface`.

An adapted module runs its own projections, passes queries, keys and values to the receiver, and the result through
its own output projection. Outside a scope it runs its original code. An adapted module is compared
with its own code at load (see `opened_layers`), so an adapter that does not fit is detected.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from torch import Tensor, nn

from kvmosaic.layers import AttentionCall
from kvmosaic.model.hook import current_receiver

_OPENED_ATTRIBUTE = "kvmosaic_opened"


class AttentionAdapter:
    """One attention module and its adapted method, which is replaced in this module only."""

    seam: ClassVar[str] = "forward"
    bias_name: ClassVar[str] = ""
    """The argument of the module's forward with a bias by position, if there is one."""

    def __init__(self, module: Any) -> None:
        self.module = module
        index = getattr(module, "layer_idx", None)
        self.layer_index: int = module.layer_id if index is None else index

    @property
    def bias_factor(self) -> float:
        """The factor by which the module multiplies its bias."""
        return 1.0

    def install(self) -> None:
        """Replaces the method, so that receivers are called."""
        self.module.__dict__[_OPENED_ATTRIBUTE] = self
        self.module.__dict__[self.seam] = self

    def remove(self) -> None:
        """Reverts `install`."""
        del self.module.__dict__[_OPENED_ATTRIBUTE], self.module.__dict__[self.seam]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The replacement that the module calls."""
        if current_receiver() is None:
            return getattr(type(self.module), self.seam)(self.module, *arguments, **named)
        return self.run(*arguments, **named)

    def run(self, *arguments: Any, **named: Any) -> Any:
        """The adapted method, with attention by the receiver."""
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None) -> Tensor:
        """[1, H, T, D] and [1, G, T, D] -> [1, T, H, Dv]."""
        receiver = current_receiver()
        assert receiver is not None, "called inside a scope"
        query, key, value = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
        call = AttentionCall(
            self.layer_index, query, key, value, scaling, None, None, self.module, mask=None, window=window
        )
        output: Tensor = receiver(call)
        return output.to(value.dtype).unsqueeze(0)


class _Bloom(AttentionAdapter):
    bias_name = "alibi"

    def run(self, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> Any:
        module = self.module
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        attended = self.attend(query, key, value, module.inv_norm_factor)
        return residual + module.dense(attended.flatten(2)), None


class _Mpt(AttentionAdapter):
    bias_name = "position_bias"

    def run(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        module = self.module
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = (_heads(part, module.n_heads) for part in mixed.chunk(3, dim=2))
        return module.out_proj(self.attend(query, key, value, module.softmax_scale).flatten(2)), None


class _Falcon(AttentionAdapter):
    bias_name = "alibi"

    @property
    def bias_factor(self) -> float:
        return float(self.module.inv_norm_factor)

    def run(
        self, hidden_states: Tensor, alibi: Tensor | None, *_: Any, position_embeddings: Any = None, **__: Any
    ) -> Any:
        module = self.module
        query, key, value = (
            part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden_states))
        )
        if module.new_decoder_architecture:
            # the module repeats keys for every query head of a group; one of them is kept
            group = module.num_heads // module.num_kv_heads
            key, value = key[:, ::group], value[:, ::group]
        if alibi is None:
            rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
            query, key = rotate(query, key, *position_embeddings)
        return module.dense(self.attend(query, key, value, module.inv_norm_factor).flatten(2)), None


class _Xglm(AttentionAdapter):
    def run(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        module = self.module
        query, key, value = (
            _heads(project(hidden_states), module.num_heads)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        return module.out_proj(self.attend(query, key, value, module.scaling).flatten(2)), None


class _GptJ(AttentionAdapter):
    """CodeGen, and GPT-J before transformers 5.24: one of their methods takes rotated queries and keys."""

    seam = "_attn"

    def run(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return self.attend(query, key, value, 1.0 / self.module.scale_attn).transpose(1, 2), None


class _GptNeo(AttentionAdapter):
    seam = "_attn"

    def run(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        window = self.module.config.window_size if self.module.attention_type == "local" else None
        return self.attend(query, key, value, 1.0, window).transpose(1, 2), None


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """[1, T, H * D] -> [1, H, T, D]."""
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2)


_FORMS: dict[str, type[AttentionAdapter]] = {
    "BloomAttention": _Bloom,
    "MptAttention": _Mpt,
    "FalconAttention": _Falcon,
    "XGLMAttention": _Xglm,
    "GPTJAttention": _GptJ,
    "CodeGenAttention": _GptJ,
    "GPTNeoSelfAttention": _GptNeo,
}


def install_adapters(model: nn.Module) -> list[AttentionAdapter]:
    """Adapts every supported attention module of a transformers model; idempotent."""
    opened = []
    for part in model.modules():
        form = _FORMS.get(type(part).__name__)
        if form is None or not type(part).__module__.startswith("transformers.") or not hasattr(part, form.seam):
            continue
        opened.append(form(part))
        opened[-1].install()
    return opened


def installed_adapters(model: nn.Module) -> list[AttentionAdapter]:
    """The adapted attention modules."""
    found = (part.__dict__.get(_OPENED_ATTRIBUTE) for part in model.modules())
    return [opened for opened in found if opened is not None]


def remove_adapters(model: nn.Module) -> None:
    """Restores the original code of all attention modules."""
    for opened in installed_adapters(model):
        opened.remove()
