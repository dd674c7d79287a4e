"""The attention function registered with transformers: one registered function, one receiver per forward.

transformers calls the function of the model's `attn_implementation` in every layer, with queries and keys that are
already normed and rotated. Ours passes the call to the receiver of the current `attention_scope`. The receiver is
held in a context variable because some model families drop unknown keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from torch import Tensor, nn

from kvmosaic.errors import ModelError
from kvmosaic.layers.spec import LATENT_ATTRIBUTE, AttentionCall

ATTENTION_NAME = "kvmosaic"
"""`attn_implementation` of a loaded model. transformers builds no mask for it: the receiver applies masks."""
PROBE_NAME = "kvmosaic_probe"
"""The same function, with masks: each call carries the predicate of which keys a query sees."""
LAYER_ATTRIBUTE = "kvmosaic_layer"
"""Attribute of an attention module with its number among those, where some layers of the model have no attention."""
OWN_NAME = "kvmosaic_own"
"""The model's own attention function over a written-out mask, with an observer (see `own_code`)."""
_HARMLESS = {"position_ids", "cache_position", "position_embeddings"}
"""Tensors that models pass to every attention function, for kernels that rotate or pack by themselves."""


Receiver = Callable[[AttentionCall], Any]
"""Takes a call, returns [T, H, Dv]; for an indexer, the keys that it chooses, in a form of its own."""

_current_receiver: ContextVar[Receiver | None] = ContextVar("kvmosaic_receiver", default=None)


class attention_scope:  # noqa: N801 - used as `with attention_scope(receiver):`
    """Sends the attention of every forward inside the `with` block to `receiver`; scopes nest."""

    __slots__ = ("_receiver", "_token")

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._token: Token[Receiver | None] | None = None

    def __enter__(self) -> None:
        self._token = _current_receiver.set(self._receiver)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current_receiver.reset(self._token)


def current_receiver() -> Receiver | None:
    """The receiver of the current scope."""
    return _current_receiver.get()


def install() -> None:
    """Registers the attention function with transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionInterface.register(PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(PROBE_NAME, _mask_predicate)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    indices: Any = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function transformers calls: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, Dv]."""
    receiver = _current_receiver.get()
    if receiver is None:
        raise ModelError(
            "this model's attention was called outside attention_scope; call it through LoadedModel.forward, "
            "or model.set_attn_implementation('eager') to use it with transformers alone"
        )
    call = call_of(module, query, key, value, attention_mask, scaling, softcap, s_aux, sliding_window, indices)
    return answer_of(call, receiver), None


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
) -> tuple[Tensor, None]:
    """Like `_attention`; the call names the tensors that `_attention` would drop."""
    receiver = _current_receiver.get()
    assert receiver is not None, "probed inside attention_scope"
    known = {name: named.get(name) for name in ("scaling", "softcap", "s_aux", "sliding_window", "indices")}
    call = call_of(module, query, key, value, attention_mask, **known)
    call.unknown = tuple(
        name for name, part in named.items() if isinstance(part, Tensor) and name not in known.keys() | _HARMLESS
    )
    return answer_of(call, receiver), None


def call_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    indices: Any = None,
) -> AttentionCall:
    """Converts the arguments of an attention function to one call; latents are read by absorbed queries.

    `indices` is what an indexer returned: here, the choice of the receiver.
    """
    latent = module.__dict__.get(LATENT_ATTRIBUTE)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return AttentionCall(
        module.__dict__.get(LAYER_ATTRIBUTE, module.layer_idx),
        (query if latent is None else latent.absorb(query))[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        softcap,
        s_aux,
        module,
        mask,
        sliding_window,
        chosen=indices,
    )


def answer_of(call: AttentionCall, receiver: Receiver) -> Tensor:
    """[1, T, H, Dv], as transformers expects it: the receiver's result, expanded if it is a latent."""
    out: Tensor = receiver(call)
    latent = call.latent
    if latent is not None:
        out = latent.expand(out)
    if out.dtype is not call.query.dtype:
        out = out.to(call.query.dtype)
    return out.unsqueeze(0).contiguous()


def _mask_predicate(*_: object, mask_function: Any = None, **__: object) -> Any:
    """The mask of a layer, as the predicate that it would be built from."""
    return mask_function
