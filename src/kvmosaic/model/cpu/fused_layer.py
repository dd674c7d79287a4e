"""Fused layer: a whole decoder layer of transformers from the fused forms of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kvmosaic.model.cpu.fused import Fused, FusedMlp, FusedNorm, fused_form, suits, suits_weight
from kvmosaic.model.cpu.fused_attention import FusedAttention
from kvmosaic.model.hook import current_receiver


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Names of a layer's norms: before and after each of its two parts."""

    before_attention: str
    after_attention: str | None
    before_mlp: str
    after_mlp: str | None

    @property
    def names(self) -> set[str]:
        """All of them."""
        names = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return {name for name in names if name is not None}


LAYER_FORMS = (
    LayerForm("input_layernorm", None, "post_attention_layernorm", None),
    LayerForm("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


class FusedLayer(Fused):
    """A decoder layer: the first residual is added in the call of the norm that follows.

    Parts without hooks are called without `nn.Module.__call__`, which takes a good share of a decode step
    outside its linear layers.
    """

    kind = "layers"

    def __init__(self, module: nn.Module, form: LayerForm) -> None:
        super().__init__(module)
        self._form = form
        parts = module._modules
        self._attention_hooks = _hooks(parts[form.before_attention], parts["self_attn"])
        self._norm_hooks = _hooks(parts[form.before_mlp])
        self._mlp_hooks = _hooks(parts["mlp"], parts[form.after_mlp] if form.after_mlp else None)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Hidden states [1, T, hidden] -> [1, T, hidden]."""
        x = arguments[0] if len(arguments) == 1 else None
        parts: Any = self.module._modules
        form = self._form
        second = fused_form(parts[form.before_mlp])
        if (
            not suits(x)
            or not isinstance(second, FusedNorm)
            or any(self._norm_hooks)
            or not suits_weight(second.module._parameters["weight"])
        ):
            return self.own_code(*arguments, **named)
        attended = self._attend(x, named)
        if not suits(attended):
            attended = attended.contiguous()
        x, normed = second.apply_to_sum(attended, x)
        mlp = fused_form(parts["mlp"])
        if not isinstance(mlp, FusedMlp) or any(self._mlp_hooks) or not mlp.can_apply():
            return x + self._after(form.after_mlp, parts["mlp"](normed))
        # without hooks, the output of an MLP or norm has no other owner
        return self._after(form.after_mlp, mlp.apply(normed)).add_(x)

    def _attend(self, x: Tensor, named: dict[str, Any]) -> Tensor:
        parts: Any = self.module._modules
        form = self._form
        first, attention = fused_form(parts[form.before_attention]), fused_form(parts["self_attn"])
        receiver = current_receiver()
        if (
            receiver is not None
            and not any(self._attention_hooks)
            and isinstance(first, FusedNorm)
            and isinstance(attention, FusedAttention)
            and attention.can_apply(x, named)
        ):
            return self._after(form.after_attention, attention.apply(first.apply(x), receiver, named))
        attended = parts["self_attn"](hidden_states=parts[form.before_attention](x), **named)[0]
        return self._after(form.after_attention, attended)

    def _after(self, name: str | None, x: Tensor) -> Tensor:
        """Applies what follows a part: nothing, or a norm of that name."""
        if name is None:
            return x
        part: Any = self.module._modules[name]
        out: Tensor = part(x)
        return out


def _hooks(*parts: nn.Module | None) -> tuple[dict[int, Any], ...]:
    """The hook dictionaries of these modules, which also show later hooks."""
    return tuple(
        hooks for part in parts if part is not None for hooks in (part._forward_hooks, part._forward_pre_hooks)
    )
