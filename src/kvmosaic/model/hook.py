"""The door into a transformers model's attention: one registered function, one receiver per forward.

transformers calls the function of the model's `attn_implementation` in every layer, with queries and keys that are
normed and rotated already. Ours hands the call to the receiver of the current `attention_scope`. The receiver travels
in a context variable because some model families drop keyword arguments they do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvmosaic.errors import ModelError

ATTENTION_NAME = "kvmosaic"
"""`attn_implementation` of a loaded model. transformers builds no mask for it: masks are the receiver's matter."""
PROBE_NAME = "kvmosaic_probe"
"""The same function, with masks: each call carries the predicate that says which keys a query sees."""
LATENT_ATTRIBUTE = "kvmosaic_latent"
"""Where an attention module that keeps latents has its projection (see `latent`)."""


@dataclass(slots=True)
class AttentionCall:
    """One layer's attention over the T tokens of a flattened forward.

    query: [T, H, D], normed and rotated
    key: [T, G, D]
    value: [T, G, Dv]; in latent layers the first Dv numbers of the one key head (the same memory)
    sinks: [H], scores of a key that has no value, or None
    mask: with `PROBE_NAME`, a predicate (batch, head, query index, key index) -> bool; otherwise None
    window: what the model says about its sliding window, if it says so by argument
    """

    layer_index: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    module: nn.Module
    mask: Any = None
    window: int | None = None


Receiver = Callable[[AttentionCall], Tensor]
"""Takes a call, returns [T, H, Dv]."""

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
    """The receiver of the scope we are in."""
    return _current_receiver.get()


def is_in_scope() -> bool:
    """Whether a receiver is waiting for calls."""
    return _current_receiver.get() is not None


def install() -> None:
    """Registers the attention function with transformers. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionInterface.register(PROBE_NAME, _attention)
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
    **_: object,
) -> tuple[Tensor, None]:
    """The function transformers calls: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, Dv]."""
    receiver = _current_receiver.get()
    if receiver is None:
        raise ModelError(
            "this model's attention was called outside attention_scope; call it through LoadedModel.forward, "
            "or model.set_attn_implementation('eager') to use it with transformers alone"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    latent = module.__dict__.get(LATENT_ATTRIBUTE)
    if latent is not None:
        query = latent.absorb(query)
    call = AttentionCall(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        softcap,
        s_aux,
        module,
        attention_mask,
        sliding_window,
    )
    out = receiver(call)
    if latent is not None:
        out = latent.expand(out)
    if out.dtype is not query.dtype:
        out = out.to(query.dtype)
    return out.unsqueeze(0).contiguous(), None


def _mask_predicate(*_: object, mask_function: Any = None, **__: object) -> Any:
    """The mask of a layer, as the predicate it would be built from."""
    return mask_function
