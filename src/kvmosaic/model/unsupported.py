"""Unsupported models: checks of configuration and modules that rule out composed prompts, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvmosaic.errors import WAY_OUT, UnsupportedModel
from kvmosaic.model.indexer import indexers
from kvmosaic.model.states import state_modules

_RULES_OF_MANY_TOKENS = {
    "compressed_sparse_attention": "attends to compressed groups of tokens",
    "heavily_compressed_attention": "attends to compressed groups of tokens",
    "minimax_m3_sparse": "lets each query choose its keys among all tokens by a top-k indexer",
    "reference_sliding_attention": "treats the tokens of a prompt and of its answer differently",
}
"""Layer types whose rule shows only in long prompts, so that six tokens cannot detect it."""
_STATE = re.compile("Mamba|Rwkv|LSTM|SSM|RecurrentBlock|ShortConv|DeltaNet|DeltaAttention|LightningAttention")
"""Parts of the names of modules with a state from token to token."""
_STATE_LAYERS = {"linear_attention", "mamba", "conv", "recurrent", "hybrid"}
"""Names of such layers in configurations."""
_CROSS_ATTENTION = {"crossattention", "cross_attention", "cross_attn", "encoder_attn"}
"""Names of the attention that reads another model's output."""


def check_config(config: Any) -> None:
    """Refuses encoder-decoder models, by their configuration.

    Raises:
        UnsupportedModel: it is one.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(config).__name__.removesuffix('Config')} is an encoder-decoder model: in its encoder every token "
            "sees the tokens after it, so that no part of a prompt can be computed before the rest is known; "
            "use a decoder-only model, docs/architectures.md lists the supported ones"
        )


def check_rules(module: Any) -> None:
    """Refuses models whose tokens depend on each other in other ways than a causal mask allows.

    Raises:
        UnsupportedModel: what the model does, why that cannot be composed, and the fix.
    """
    check_config(module.config)
    reason = next(_reasons(module), "")
    if reason:
        raise UnsupportedModel(f"{type(module).__name__} {reason}; {WAY_OUT}")


def _reasons(module: Any) -> Iterator[str]:
    config = module.config.get_text_config()
    names = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    if getattr(config, "add_cross_attention", False) or names & _CROSS_ATTENTION:
        yield "reads the output of an encoder by cross-attention, and there is no encoder when it reads text alone"
    kinds = list(dict.fromkeys(type(part).__name__ for part in module.modules()))[1:]
    states = [kind for kind in kinds if _STATE.search(kind) and not kind.endswith("Model")]
    states += [kind for kind in getattr(config, "layer_types", None) or () if kind in _STATE_LAYERS]
    if states and next(state_modules(module), None) is None:
        yield (
            f"carries a recurrent or convolutional state from token to token ({states[0]}), and its code does not keep "
            "it in a cache of transformers, where it could be read and set"
        )
    if any(hasattr(part, "relative_attention_bias") for part in module.modules()) or any(
        "Relative" in k for k in kinds
    ):
        yield (
            "adds a learned bias to every score that is looked up by the distance of two tokens (relative position "
            "buckets), which a chunk at another place would need again"
        )
    for kind in getattr(config, "layer_types", None) or ():
        if kind in _RULES_OF_MANY_TOKENS:
            yield f"{_RULES_OF_MANY_TOKENS[kind]} ({kind}), which cannot be composed from parts"
    known = {type(indexer).__name__ for indexer, _ in indexers(module)}
    if others := [kind for kind in kinds if "Indexer" in kind and kind not in known]:
        yield (
            f"lets each query choose its keys by an indexer ({others[0]}) that does not keep one key per token in a "
            "cache of transformers, where it could be read, so that parts of a prompt cannot be composed"
        )
