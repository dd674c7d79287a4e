"""Loaded model: a transformers model that runs with our attention, and its detected properties."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import InvalidAdapter, InvalidConfig, UnsupportedModel
from kvmosaic.layers import AttentionCall, LayerSpec
from kvmosaic.layout import Layout, LayoutAdapter, later_tokens_seen
from kvmosaic.model.cpu.fuse import count_fused, fuse_operations
from kvmosaic.model.cpu.prepack import PackedLinear, Prepack, prepack_linears
from kvmosaic.model.fingerprint import fingerprint as compute_fingerprint
from kvmosaic.model.frequencies import changes_with_length, pin_frequencies, pinned_note
from kvmosaic.model.hook import Receiver, attention_scope
from kvmosaic.model.lora import LoraAdapter, attach, computes_keys_of_base, uncalled_layers
from kvmosaic.model.probe.probe import num_learned_positions, probe_layers
from kvmosaic.model.states import Mixer, StateLayer, install_states, mixing_scope
from kvmosaic.sampling.params import FOLLOWED

_MAX_POSITIONS = 2**27
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")


@dataclass(eq=False)
class LoadedModel:
    """A model with its tokenizer, its layers and its limits. Build it with `load_model` or `from_module`.

    The module is the user's own transformers model, with three changes: its attention function (or adapted
    attention modules, if it has none), pinned frequencies if they change with length, and latent attention
    modules that pass latents to a receiver in scope; and a fourth if requested, packed linear layers and
    fused operations.
    """

    module: Any
    tokenizer: Any
    """A transformers tokenizer, or None if the model came without one."""
    config: Any
    """The configuration of the text model."""
    layers: tuple[LayerSpec, ...]
    """Those with attention."""
    max_positions: int | None
    """Positions 0 … max_positions - 1 may be used; None: no limit."""
    max_forward_tokens: int | None
    """Most tokens of one flattened forward, for models that count them; None: no limit."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_settings: Mapping[str, Any]
    """Sampling settings of its generation configuration, unchecked."""
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    """Identity of the model: see `fingerprint`."""
    weights_note: str = ""
    """Describes how quantized weights were loaded, and their memory; empty if they were plain."""
    frequency_note: str = ""
    """How its rotary frequencies differ from those of transformers; empty if they do not."""
    keeps_rows: bool = field(default=True, repr=False)
    """Whether its forward takes the rows that need logits."""
    state_layers: tuple[StateLayer, ...] = field(default=(), repr=False)
    """Layers with a state."""
    adapters: Mapping[str, LayoutAdapter] = field(default_factory=dict)
    """Low-rank adapters beside its weights, by name, the default one first."""

    @classmethod
    def from_module(
        cls,
        model: Any,
        tokenizer: Any = None,
        fingerprint: str | None = None,
        *,
        max_positions: int | None = None,
        prepack: Prepack = False,
        adapters: Mapping[str, LoraAdapter] = MappingProxyType({}),
    ) -> LoadedModel:
        """Wraps a transformers model that is already in memory. It is put in evaluation mode.

        Args:
            model: a `...ForCausalLM`.
            tokenizer: its tokenizer, for text input or output.
            fingerprint: its identity, if known; otherwise computed from configuration and weights.
            max_positions: the longest sequence to run, at most the model's limit. Frequencies that change with the
                length are pinned for it.
            prepack: see `load_model`. The model's own linear layers are replaced and can no longer be trained, and its
                small operations are fused.
            adapters: low-rank adapters to keep beside its weights, by the name that prompts give; the first one
                computes prompts with documents that name none. Operations of adapted layers are not fused.

        Raises:
            UnsupportedModel: its attention cannot be reached, or its tokens are mixed by more than attention.
            InvalidAdapter: an adapter is for another model.
            InvalidConfig: `max_positions` is not between 1 and the model's limit, or `prepack` cannot be done.
        """
        model.eval()
        config = model.config.get_text_config()
        allowed = limit = position_limit(config)
        if max_positions is not None:
            limit = _checked_positions(max_positions, allowed, changes_with_length(model))
        pin_frequencies(model, limit or _MAX_POSITIONS)
        embeddings = model.get_input_embeddings().weight
        states = install_states(model, int(config.hidden_size), embeddings)
        layers = probe_layers(model, allowed)
        limit = min(filter(None, (limit, num_learned_positions(model, layers, allowed))), default=None)
        forward_limit = _counted_tokens(config, layers)
        identity = fingerprint or compute_fingerprint(model, model.config)
        if states and adapters:
            raise InvalidAdapter(
                f"{type(model).__name__} has layers with a state, whose rows are not computed in one go, so that an "
                "adapter cannot be applied to some of them; merge the adapter into the weights (merge_adapter=True, "
                "--merge-adapter)"
            )
        num_layers = sum(not layer.num_chosen for layer in layers)
        for adapter in adapters.values():
            attach(model, adapter)
        if adapters and (names := uncalled_layers(model, partial(_forward_blindly, model))):
            raise InvalidAdapter(
                f"an adapter changes {names[0]} and {len(names) - 1} more layers whose weights "
                f"{type(model).__name__} reads itself, so that it would be left out there; merge the adapter into the "
                "weights (merge_adapter=True, --merge-adapter)"
            )
        if prepack_linears(model, prepack):
            fuse_operations(model, limit)
        return cls(
            module=model,
            tokenizer=tokenizer,
            config=config,
            layers=layers,
            max_positions=min(limit or forward_limit, forward_limit) if forward_limit else limit,
            max_forward_tokens=forward_limit,
            vocab_size=min(int(config.vocab_size), embeddings.shape[0]),
            eos_token_ids=_eos_token_ids(model, tokenizer),
            generation_settings=_generation_settings(model),
            dtype=embeddings.dtype,
            device=embeddings.device,
            fingerprint=identity,
            frequency_note=pinned_note(model),
            keeps_rows="logits_to_keep" in inspect.signature(model.forward).parameters,
            state_layers=states,
            adapters={name: _layout_adapter(adapter, num_layers) for name, adapter in adapters.items()},
        )

    @property
    def engine_name(self) -> str:
        """What runs it."""
        return "transformers"

    def why_unreadable(self, layout: Layout) -> str:
        """Why a prompt so arranged cannot be read, and the way out; empty when it can."""
        chunked = self._chunked_layer
        if chunked is None or not (text := later_tokens_seen(layout)):
            return ""
        return (
            f"{text}, which layer {chunked.index} of this model hides: it attends in parts of {chunked.mask.size} "
            "positions; use position_offsets that do not overlap"
        )

    @property
    def no_scores_reason(self) -> str:
        """Why attention cannot be measured for a repair; empty when it can."""
        why = "this model reads the best keys only, which it chooses before attention is weighed"
        return why if self.has_indexers else ""

    @property
    def has_indexers(self) -> bool:
        """Whether some layers choose the keys that others read."""
        return any(layer.num_chosen for layer in self.layers)

    @property
    def immovable_reason(self) -> str:
        """Why cached tokens cannot be used at another position, naming the layers; empty when they can."""
        reasons: dict[str, list[int]] = {}
        for layer in self.layers:
            if not layer.is_movable:
                reasons.setdefault(layer.immovable_reason, []).append(layer.index)
        return "; ".join(f"{_layer_range(indices, len(self.layers))}: {why}" for why, indices in reasons.items())

    @property
    def is_movable(self) -> bool:
        """Whether every layer's keys may be used at another position than the one they were computed at."""
        return all(layer.is_movable for layer in self.layers)

    @property
    def no_window_reason(self) -> str:
        """Why a text cannot have a rolling window, which moves its tokens; empty when it can."""
        if self.state_layers:
            return f"{self.state_text}, from which single tokens cannot be taken away again"
        if self.has_indexers:
            return "this model chooses the keys that it reads, and a rolling window is only for models that read all"
        if not self.is_movable or (chunked := self._chunked_layer) is None:
            return self.immovable_reason
        return (
            f"layer {chunked.index} of this model attends in parts of {chunked.mask.size} tokens "
            "that begin at fixed places"
        )

    @property
    def state_text(self) -> str:
        """That it carries a state from token to token; empty where it does not."""
        layers = self.state_layers
        return f"layer {layers[0].index} of this model carries a state from token to token" if layers else ""

    @property
    def _chunked_layer(self) -> LayerSpec | None:
        return next((layer for layer in self.layers if layer.mask.kind == "chunked"), None)

    repairs_run_by_run = False

    @property
    def no_repair_reason(self) -> str:
        """Why single tokens of a document cannot be computed again; empty when they can."""
        biased = next((layer for layer in self.layers if layer.bias is not None), None)
        if biased is None:
            return ""
        return f"layer {biased.index} of this model adds a bias by distance, which is only done for neighbours"

    @property
    def has_bias(self) -> bool:
        """Whether any layer adds a bias by distance to its scores (ALiBi)."""
        return any(layer.bias is not None for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """Count of numbers in all weights, shared ones once."""
        packed = (part for part in self.module.modules() if isinstance(part, PackedLinear) and not part.is_copy)
        num_plain: int = sum(parameter.numel() for parameter in self.module.parameters())
        return num_plain + sum(part.in_features * part.out_features for part in packed)

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights, packed copies among them."""
        plain = sum(tensor.nbytes for tensor in (*self.module.parameters(), *self.module.buffers()))
        packed = (part for part in self.module.modules() if isinstance(part, PackedLinear))
        return int(plain) + sum(part.packed_bytes for part in packed)

    @property
    def is_prepacked(self) -> bool:
        """Whether any linear layer is packed."""
        return any(isinstance(part, PackedLinear) for part in self.module.modules())

    @property
    def state_bytes(self) -> int:
        """Memory of one state of all layers; 0: it has none."""
        return sum(layer.num_bytes for layer in self.state_layers)

    @property
    def map_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Dtypes and shapes of what is kept of the states of one document, layer by layer."""
        return tuple(shape for layer in self.state_layers for shape in layer.map_shapes)

    @property
    def map_bytes(self) -> int:
        """Memory of what is kept of the states of one document, beside its keys and values."""
        return sum(layer.map_bytes for layer in self.state_layers)

    @property
    def kind(self) -> str:
        """Name of its class."""
        return type(self.module).__name__

    @property
    def weights_text(self) -> str:
        """Type and place of its weights: "in bfloat16 on cpu, packed linear layers"."""
        packed = ", packed linear layers" if self.is_prepacked else ""
        return f"in {self.cache_type} on {self.device}{packed}"

    @property
    def weight_type(self) -> str:
        """Of its linear layers: "bfloat16"."""
        return self.cache_type

    @property
    def cache_type(self) -> str:
        """Of cached keys and values: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def weight_device(self) -> str:
        """Where its weights are."""
        return str(self.device)

    @property
    def engine_build(self) -> str:
        """Package and version of what runs it."""
        return f"transformers {metadata.version('transformers')}"

    @property
    def num_fused(self) -> Mapping[str, int]:
        """Modules whose small operations are fused, by kind: norms, MLPs, attention modules, layers."""
        return count_fused(self.module)

    def bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return sum(layer.bytes_per_token(dtype or self.dtype) for layer in self.layers)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        receiver: Receiver,
        mixer: Mixer | None = None,
    ) -> Tensor:
        """One flattened forward: all tokens in one row, separated by the receiver's attention alone.

        Args:
            token_ids: [T] whole numbers on the model's device.
            positions: [T], position of each token.
            logit_rows: [R], the rows that need logits.
            receiver: called once per layer, in order.
            mixer: the same for layers with a state.

        Returns:
            [R, V] logits, in the model's dtype.
        """
        if self.max_forward_tokens is not None and token_ids.shape[0] > self.max_forward_tokens:
            raise UnsupportedModel(
                f"{type(self.module).__name__} counts the tokens of a forward and is exact up to "
                f"{self.max_forward_tokens}, got {token_ids.shape[0]}; lower max_num_batched_tokens"
            )
        assert mixer is not None or not self.state_layers, "layers with a state need to know whose rows they get"
        arguments = {"logits_to_keep": logit_rows} if self.keeps_rows else {}
        with torch.inference_mode(), attention_scope(receiver), mixing_scope(mixer):
            logits: Tensor = self.module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **arguments
            ).logits[0]
            return logits if self.keeps_rows else logits[logit_rows]


def _forward_blindly(model: Any) -> None:
    """A forward of two tokens whose attention gives zeros: it shows which layers are called."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)

    def zeros(call: AttentionCall) -> Tensor:
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[-1])

    with torch.inference_mode(), attention_scope(zeros):
        model(input_ids=tokens, position_ids=torch.arange(2, device=tokens.device)[None], use_cache=False)


def _layout_adapter(adapter: LoraAdapter, num_layers: int) -> LayoutAdapter:
    return LayoutAdapter(adapter.digest, "" if computes_keys_of_base(adapter, num_layers) else adapter.digest)


def position_limit(config: Any) -> int | None:
    """The max position of a configuration, or None."""
    limits = (getattr(config, name, None) for name in _LENGTH_FIELDS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _checked_positions(wanted: int, limit: int | None, may_exceed: bool) -> int:
    """A user's `max_positions`; frequencies made for any length may go beyond the configuration's."""
    highest = _MAX_POSITIONS if limit is None or may_exceed else limit
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= highest:
        raise InvalidConfig(f"max_model_len must be a whole number between 1 and {highest}, got {wanted!r}")
    return wanted


def _counted_tokens(config: Any, layers: tuple[LayerSpec, ...]) -> int | None:
    """Most tokens of a forward, for a model that counts rows instead of reading positions; None: no limit.

    Llama 4 scales the queries of its layers without rotation by the row number, from row `floor_scale` on.
    """
    if getattr(config, "attn_temperature_tuning", False) and any(layer.rotation is None for layer in layers):
        scale = getattr(config, "floor_scale", None)
        return int(scale) - 1 if scale else None
    return None


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the generation configuration's (or the model's), and the tokenizer's."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    declared = getattr(generation, "eos_token_id", None)
    if declared is None:
        declared = getattr(model.config.get_text_config(), "eos_token_id", None)
    for token in (declared, getattr(tokenizer, "eos_token_id", None)):
        found.update(token if isinstance(token, list | tuple) else [] if token is None else [token])
    return tuple(sorted(int(token) for token in found))


def _generation_settings(model: Any) -> dict[str, Any]:
    generation = getattr(model, "generation_config", None)
    declared = {name: getattr(generation, name, None) for name in ("do_sample", *FOLLOWED)}
    return {name: value for name, value in declared.items() if value is not None}


def _layer_range(indices: list[int], total: int) -> str:
    if len(indices) == total:
        return "every layer" if total > 1 else "its only layer"
    return ("layers " if len(indices) > 1 else "layer ") + ", ".join(str(index) for index in indices)
