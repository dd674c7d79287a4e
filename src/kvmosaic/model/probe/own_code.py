"""Own code: the model's attention function, run next to ours on the same queries, keys and values of each layer.

    module forward ─▶ query, key, value ─┬─▶ eager_attention_forward of its modelling file ─▶ continues the forward
                                         └─▶ observer

No error accumulates: whatever is compared in a layer has the same input there. Fused operations are removed during
the forward; calls of their modules are recorded, so that they can be compared with the code they replace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.errors import ModelError
from kvmosaic.layers import AttentionCall
from kvmosaic.layers.spec import LATENT_ATTRIBUTE
from kvmosaic.model.cpu.fused import Fused, fused_form
from kvmosaic.model.hook import OWN_NAME, attention_scope, call_of
from kvmosaic.model.hook import current_receiver as current_observer
from kvmosaic.model.indexer import own_choices
from kvmosaic.model.loaded import LoadedModel

AttentionObserver = Callable[[AttentionCall, Tensor], None]
"""Takes a layer's call, and the output of the model's own function: [T, H, Dv], in float32 or wider; for an indexer,
the numbers [T, K] of the keys that it chooses."""


@dataclass(frozen=True, slots=True)
class FusedCall:
    """One call of a module that has a fused form, and the output of the module's own code."""

    form: Fused
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    output: Tensor


def run_own_code(model: LoadedModel, token_ids: Sequence[int], observe: AttentionObserver) -> list[FusedCall]:
    """Runs one ordinary forward of transformers' code, from position 0 on; `observe` gets every attention call.

    Not for models with attention inside their modules (see `opening`): they have no attention function.

    Returns:
        The calls of the outermost modules that have a fused form.

    Raises:
        ModelError: the modelling file has no attention function of its own.
    """
    module = model.module
    calls: list[FusedCall] = []
    with torch.inference_mode(), ExitStack() as stack:
        stack.enter_context(_own_operations(module, calls))
        stack.enter_context(_own_attention(module))
        stack.enter_context(attention_scope(observe))  # type: ignore[arg-type]
        stack.enter_context(own_choices(module, observe))
        options = {"logits_to_keep": torch.tensor([len(token_ids) - 1], device=model.device)}
        tokens = torch.tensor([list(token_ids)], device=model.device)
        module(input_ids=tokens, use_cache=False, **options if model.keeps_rows else {})
    return calls


@contextmanager
def _own_attention(module: Any) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(OWN_NAME, _attend_and_show)
    AttentionMaskInterface.register(OWN_NAME, eager_mask)
    before = module.config._attn_implementation
    module.set_attn_implementation(OWN_NAME)
    try:
        yield
    finally:
        module.set_attn_implementation(before)


def _attend_and_show(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: the modelling file's own, in float32 or wider, and the observer."""
    call = call_of(module, query, key, value, attention_mask, scaling, softcap, s_aux, sliding_window)
    latent = module.__dict__.get(LATENT_ATTRIBUTE)
    if latent is not None:
        key, value = latent.expand_by_own_code(key)
    extra = {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window}
    named |= {name: given for name, given in extra.items() if given is not None}
    wide = torch.promote_types(query.dtype, torch.float32)
    output, _ = _own_function(module)(
        module,
        *(part.to(wide) for part in (query, key, value)),
        None if attention_mask is None else attention_mask.to(wide),
        scaling=call.scaling,
        **named | {"dropout": 0.0},
    )
    observer: Any = current_observer()
    observer(call, output[0])
    return output.to(query.dtype), None


def _own_function(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """`eager_attention_forward` of the file that defines a module's class, or one that it inherits from."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            found: Callable[..., tuple[Tensor, Any]] = function
            return found
    raise ModelError(f"{type(module).__module__} has no eager_attention_forward to compare with")


@contextmanager
def _own_operations(module: nn.Module, calls: list[FusedCall]) -> Iterator[None]:
    """Removes all fused forms from their modules, and records the calls of the outermost ones."""
    forms = [form for part in module.modules() if (form := fused_form(part)) is not None]
    inner = {id(part) for form in forms for part in form.module.modules() if part is not form.module}
    with ExitStack() as stack:
        for form in forms:
            del form.module.__dict__["forward"]
            stack.callback(form.install)
            if id(form.module) in inner:
                continue

            def record(_: nn.Module, arguments: Any, named: Any, output: Any, form: Fused = form) -> None:
                calls.append(FusedCall(form, arguments, named, output[0] if isinstance(output, tuple) else output))

            stack.callback(form.module.register_forward_hook(record, with_kwargs=True).remove)
        yield
