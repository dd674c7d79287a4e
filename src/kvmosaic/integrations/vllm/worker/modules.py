"""Module tree around vLLM's attention layers: finds rotary embeddings and the model's root."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn

from kvmosaic.errors import NotMovable

_MAX_CLIMB = 3
"""max_depth of modules above an attention layer that may belong to it: wrapper, attention module, one more."""


class ModuleTree:
    """Parents of all live modules, found by one scan."""

    def __init__(self) -> None:
        self._parents: dict[int, list[nn.Module]] = {}
        is_frozen = gc.get_freeze_count() > 0
        if is_frozen:  # vLLM freezes live objects once it is up, and frozen objects are not listed
            gc.unfreeze()
        objects = gc.get_objects()
        if is_frozen:
            gc.freeze()
        for candidate in objects:
            if issubclass(type(candidate), nn.Module):  # isinstance would wake up lazy proxies
                for child in candidate.__dict__.get("_modules", {}).values():
                    if child is not None:
                        self._parents.setdefault(id(child), []).append(candidate)

    def parents(self, module: nn.Module) -> list[nn.Module]:
        """The modules that have this one as a direct child."""
        return self._parents.get(id(module), [])

    def root(self, module: nn.Module) -> nn.Module:
        """The outermost module around this one: the model, called with token ids and positions."""
        seen = {id(module)}
        while True:
            above = [parent for parent in self.parents(module) if id(parent) not in seen]
            if not above:
                return module
            module = above[0]
            seen.add(id(module))

    def rotary(self, layer_name: str, layer: nn.Module) -> Any | None:
        """The rotary embedding that rotates this layer's keys; None if its module has none or does not use it.

        Raises:
            NotMovable: no module holds the layer, or one with several embeddings and no unambiguous name.
        """
        level = self.parents(layer)
        if not level:
            raise NotMovable(
                f"{layer_name}: no module of the model holds this attention layer, so its rotation is not found "
                "(a model run through the transformers backend?)"
            )
        for _ in range(_MAX_CLIMB):
            level = [module for module in level if not isinstance(module, nn.ModuleList)]
            if any(_is_unused(module) for module in level):
                return None
            found = {id(rotary): rotary for module in level for rotary in _rotaries(module)}
            if len(found) > 1:
                named = {id(m.rotary_emb): m.rotary_emb for m in level if getattr(m, "rotary_emb", None) is not None}
                if len(named) != 1:
                    kinds = ", ".join(sorted(type(rotary).__name__ for rotary in found.values()))
                    raise NotMovable(f"{layer_name}: its module has several rotary embeddings ({kinds})")
                found = named
            if found:
                return next(iter(found.values()))
            level = [parent for module in level for parent in self.parents(module)]
        return None


_ROTATED_WITHOUT_WINDOW = ("v1", "force_rope", "apply_rope_all_layers")
"""Attributes of attention modules: whether layers without a window are rotated as well."""


def _is_unused(module: nn.Module) -> bool:
    """Whether a module declares that its keys are not rotated, though it may have a rotary embedding."""
    if getattr(module, "use_rope", None) is False or getattr(module, "nope", None) is True:
        return True
    if getattr(module, "is_local_attention", None) is False:
        return True
    # a family whose layers without a window have no positions, unless this attribute says otherwise
    return not getattr(module, "sliding_window", None) and any(
        getattr(module, name, None) is False for name in _ROTATED_WITHOUT_WINDOW
    )


def _rotaries(module: nn.Module) -> Iterable[Any]:
    for child in module._modules.values():
        if child is not None and (
            hasattr(child, "cos_sin_cache")
            or hasattr(child, "long_short_cos_sin_cache")
            or type(child).__name__.endswith("RotaryEmbedding")
        ):
            yield child


def window_of(layer: Any) -> int:
    """How many tokens a token of this layer sees, itself among them; 0: all before it."""
    window = getattr(layer, "sliding_window", None)
    return 0 if window is None or window < 0 else int(window)


def require_attention(layer_name: str, layer: Any, *, keeps_every_token: bool = True) -> None:
    """Raises `NotMovable` unless the layer is ordinary attention, in which a token sees those before it.

    Args:
        layer_name: for the message.
        layer: vLLM's attention layer.
        keeps_every_token: whether its cache has the tokens, too, that a window has left.
    """
    if not hasattr(layer, "head_size") or not hasattr(layer, "impl"):
        raise NotMovable(f"{layer_name} ({type(layer).__name__}) keeps something else than keys and values of tokens")
    kind = type(layer)
    is_derived = any(base.__name__ in ("Attention", "MLAAttention") for base in kind.__mro__[1:])
    if is_derived and kind.__module__.startswith(
        "vllm."
    ):  # sinks before the prompt, windows, pooled blocks: one check each
        raise NotMovable(f"{layer_name} is a {kind.__name__}, whose use of the cache is not known; nothing is moved")
    reasons = {
        "a window, and a cache without the tokens before it": bool(window_of(layer)) and not keeps_every_token,
        "attention by chunks of positions": getattr(layer, "attention_chunk_size", None) is not None,
        "the cache of another layer": getattr(layer, "kv_sharing_target_layer_name", None) is not None,
        "attention of an encoder": getattr(layer, "attn_type", "decoder") != "decoder",
        "a bias by distance (ALiBi)": getattr(layer.impl, "alibi_slopes", None) is not None,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise NotMovable(f"{layer_name} has {reason}; such layers cannot be composed")
