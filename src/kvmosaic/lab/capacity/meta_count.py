"""Model size and KV cache, counted on torch's meta device, which has shapes and no memory.

One forward of two tokens shows the queries, keys and values of every layer as the engine would get them. So whatever a
family does with its heads is counted right, and there is no list of families.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvmosaic.errors import UnsupportedModel
from kvmosaic.lab.capacity.model_facts import ModelFacts
from kvmosaic.layers import AttentionCall, LayerShape, MaskKind, MaskSpec
from kvmosaic.model.frequencies import pin_frequencies
from kvmosaic.model.hook import ATTENTION_NAME, attention_scope, install
from kvmosaic.model.indexer import hook_indexers
from kvmosaic.model.latent import can_keep_latent
from kvmosaic.model.loaded import position_limit
from kvmosaic.model.probe.probe import check_calls, number_layers, select_attention
from kvmosaic.model.states import StateLayer, hook_states, mixing_scope
from kvmosaic.model.unsupported import check_rules

_NUM_TOKENS = 2
_WINDOWS: dict[str, tuple[MaskKind, str]] = {
    "sliding_attention": ("window", "sliding_window"),
    "chunked_attention": ("chunked", "attention_chunk_size"),
}
_LONGEST = 2**27
_LOOKS_AT_TOKENS = "warn_if_padding_and_no_attention_mask"


def build_without_memory(config: Any, dtype: torch.dtype) -> Any:
    """The model of a transformers configuration, with shapes and no numbers.

    Raises:
        UnsupportedModel: transformers has no causal language model for it, or cannot build it.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # whatever the model's code raises, the answer is the same
        text = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(
            f"transformers cannot build a causal language model of this configuration ({type(error).__name__}: {text})"
        ) from error


def count(module: Any, name: str, note: str = "") -> ModelFacts:
    """Counts a causal language model on the meta device. The model is unusable afterwards.

    Raises:
        UnsupportedModel: the engine would refuse it, or its layers cannot be looked at without numbers.
    """
    module.eval()
    state_bytes = 0

    def count_state(layer: StateLayer, hidden: Tensor) -> Tensor:
        nonlocal state_bytes
        output, state = layer.run(hidden, None)
        state_bytes += state.num_bytes
        return output

    with mixing_scope(count_state):
        layers = _layers(module)
    embedding: Tensor = module.get_input_embeddings().weight
    parameters = list(module.parameters())  # shared ones once
    weight_bytes = sum(each.nbytes for each in (*parameters, *module.buffers()))
    return ModelFacts(
        name=name,
        dtype=str(embedding.dtype).removeprefix("torch."),
        element_bytes=embedding.dtype.itemsize,
        num_parameters=sum(each.numel() for each in parameters),
        weight_bytes=weight_bytes,
        max_positions=position_limit(module.config.get_text_config()),
        layers=layers,
        state_bytes=state_bytes,
        note=note,
    )


def _layers(module: Any) -> tuple[LayerShape, ...]:
    install()
    config = module.config.get_text_config()
    check_rules(module)
    hook_states(module)
    hook_indexers(module)
    select_attention(module, ATTENTION_NAME)
    pin_frequencies(module, position_limit(config) or _LONGEST)
    for part in module.modules():
        if type(part).__name__.endswith("Experts"):
            part.forward = _as_it_came  # the routing of tokens is unknown without weights
        if hasattr(part, _LOOKS_AT_TOKENS):
            setattr(part, _LOOKS_AT_TOKENS, _as_it_came)
    calls = _record(module)
    check_calls(module, calls)
    number_layers(calls)
    sources: dict[tuple[object, ...], int] = {}
    return tuple(_layer(call, sources.setdefault(_identity(call), call.layer_index), config) for call in calls)


def _record(module: Any) -> list[AttentionCall]:
    """One forward in which every token returns its own value, with a mask of ours if the model looks into its own."""
    mask = torch.zeros(1, 1, _NUM_TOKENS, _NUM_TOKENS, dtype=module.get_input_embeddings().weight.dtype, device="meta")
    error: Exception | None = None
    for options in ({}, {"attention_mask": mask}):
        try:
            return sorted(_calls(module, options), key=lambda call: call.layer_index)
        except Exception as failure:  # whatever the model's code raises, the answer is the same
            error = error or failure
    raise UnsupportedModel(
        f"{type(module).__name__} cannot be counted without computing ({type(error).__name__}: "
        f"{' '.join(str(error).split())[:120]}); kvmosaic plan MODEL --question TEXT loads the model, and shows what a "
        "token takes"
    ) from error


def _calls(module: Any, options: dict[str, Tensor]) -> list[AttentionCall]:
    calls: list[AttentionCall] = []

    def own_value(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)

    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device="meta")
    if "logits_to_keep" in inspect.signature(module.forward).parameters:
        options = options | {"logits_to_keep": torch.arange(_NUM_TOKENS, device="meta")}
    with torch.inference_mode(), attention_scope(own_value):
        module(input_ids=tokens, position_ids=tokens, use_cache=False, **options)
    return calls


def _layer(call: AttentionCall, source: int, config: Any) -> LayerShape:
    query_heads, heads = call.query.shape[1], call.key.shape[1]
    mask = _mask(call, config)
    part: Any = call.module
    if source == call.layer_index and query_heads == heads and can_keep_latent(call.module):
        rank, width = part.kv_lora_rank, part.kv_lora_rank + part.qk_rope_head_dim
        return LayerShape(source, 1, width, rank, True, call.layer_index, query_heads, mask)
    if call.num_chosen:
        width = call.key.shape[2]
        return LayerShape(source, heads, width, width, True, call.layer_index, query_heads, mask, call.num_chosen)
    sizes = call.key.shape[2], call.value.shape[2]
    return LayerShape(source, heads, *sizes, False, call.layer_index, query_heads, mask)


def _mask(call: AttentionCall, config: Any) -> MaskSpec:
    """The mask of a layer: what its call says, else what the configuration says of its kind."""
    position = int(getattr(call.module, "layer_idx", call.layer_index))  # among all layers, as far as it knows
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * (position + 1)
    kind, field = _WINDOWS.get(kinds[position], ("window", ""))
    window = call.window or getattr(config, field, None) or 0
    limit = position_limit(config)
    return MaskSpec() if not window or (limit is not None and window >= limit) else MaskSpec(kind, int(window))


def _identity(call: AttentionCall) -> tuple[object, ...]:
    """Equal for two layers that are given the same keys and values."""
    parts = (call.key, call.value)
    return tuple((part.untyped_storage()._cdata, part.storage_offset(), tuple(part.shape)) for part in parts)


def _as_it_came(given: Tensor, *_: object, **__: object) -> Tensor:
    return given
