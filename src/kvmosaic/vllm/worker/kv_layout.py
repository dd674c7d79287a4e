"""KV layout of a worker: modules around its attention layers, their cache layout and key rotation, and moves."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.errors import NotMovable
from kvmosaic.layers.geometry import FULL, MaskSpec
from kvmosaic.vllm.operations import Move, cache_owner, layer_specs
from kvmosaic.vllm.worker.key_rotation import Factors, KeyRotation, arithmetic, find_key_rotation
from kvmosaic.vllm.worker.layouts import KeyValueLayout, find_layout, with_indexers

_MAX_CLIMB = 3
"""Most modules above an attention layer that may belong to it: wrapper, attention module, one more."""


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
        "the cache of another layer": bool(cache_owner(layer)),
        "attention of an encoder": getattr(layer, "attn_type", "decoder") != "decoder",
        "a bias by distance (ALiBi)": getattr(layer.impl, "alibi_slopes", None) is not None,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise NotMovable(f"{layer_name} has {reason}; such layers cannot be composed")


@dataclass(frozen=True, eq=False, slots=True)
class LayerPlace:
    """One attention layer, its cache layout and rotation."""

    name: str
    layer: Any
    """vLLM's attention layer."""
    layout: KeyValueLayout
    rotation: KeyRotation | None
    """Layers with equal rotations share one; None: keys of this layer do not depend on their position."""
    window: int = 0
    """How many tokens a token sees, itself among them, counted in its request; 0: all before it."""

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which its cache keeps numbers of this one."""
        quantization = self.layout.quantization
        return dtype if quantization is None else quantization.format

    @property
    def mask(self) -> MaskSpec:
        """What a token sees where positions are counted, as they are in documents that are read in place."""
        return MaskSpec("window", self.window) if self.window else FULL


@dataclass(frozen=True, eq=False, slots=True)
class KVLayout:
    """The attention layers of one worker, all of which store a token in the same slot."""

    layers: tuple[LayerPlace, ...]
    block_size: int
    """Tokens per block, as the scheduler counts them."""
    num_blocks: int
    device: torch.device
    root: nn.Module
    """The model, called with token ids and positions."""
    is_shared: bool = False
    """Whether layers without a cache of their own read that of one of these."""

    @classmethod
    def of(cls, vllm_config: Any, kv_caches: Mapping[str, Any], kv_cache_config: Any = None) -> KVLayout:
        """Finds the layout of every layer that has a cache.

        Args:
            vllm_config: vLLM's configuration, after the model was loaded.
            kv_caches: argument of `register_kv_caches`: a cache for each layer's name.
            kv_cache_config: how the scheduler splits them into blocks; None: as the configuration says.

        Raises:
            NotMovable: some layer cannot be moved; the message names it and the reason.
        """
        _require_whole_tokens(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        dtype = vllm_config.model_config.dtype
        if not kv_caches:
            raise NotMovable("the model has no layer with a cache of keys and values")
        tree = ModuleTree()
        turnings: dict[tuple[int, int, str], KeyRotation] = {}
        places = []
        for name, layer, kv_cache, indexer in with_indexers(layers, kv_caches):
            if layer is None:
                raise NotMovable(f"the cache {name} belongs to no attention layer")
            if cache_owner(layer) in kv_caches:
                continue
            require_attention(name, layer, keeps_every_token=_keeps_every_token(kv_cache_config))
            layout: Any = find_layout(name, layer, kv_cache, indexer)
            rotation = None
            rotary = tree.rotary(name, layer)
            if rotary is not None:
                at_end = layout.is_latent or int(getattr(rotary, "head_size", layout.key_size)) < layout.key_size
                rotation = find_key_rotation(name, rotary, dtype, layout.key_size, at_end=at_end)
                if hasattr(layout, "fitted"):
                    rotation = layout.fitted(rotation)
                rotation = turnings.setdefault((id(rotary), rotation.first, rotation.layout), rotation)
            places.append(LayerPlace(name, layer, layout, rotation, window_of(layer)))
        if not turnings:
            raise NotMovable(
                "no layer has a rotary embedding of vLLM's: positions are learned, or keys are turned where it is not "
                "seen (--model-impl transformers); such models cannot be composed"
            )
        block_size = _block_size(vllm_config, kv_cache_config)
        for place in places:
            if block_size % place.layout.block_size:
                raise NotMovable(
                    f"{place.name} has blocks of {place.layout.block_size} tokens, which do not fill the scheduler's "
                    f"blocks of {block_size}"
                )
        root = tree.root(places[0].layer)
        if getattr(vllm_config.model_config, "uses_mrope", False):
            require_plain_text_positions(root, int(vllm_config.model_config.get_vocab_size()))
        first = next(iter(kv_caches.values()))
        return cls(
            layers=tuple(places),
            block_size=block_size,
            num_blocks=min(place.layout.num_slots for place in places) // block_size,
            device=first.device if isinstance(first, Tensor) else first[0].device,
            root=root,
            is_shared=any(cache_owner(layer) in kv_caches for layer in layers.values()),
        )

    def slots(self, blocks: Sequence[int], start: int, num_tokens: int) -> Tensor:
        """[num_tokens] int64, on the host: slots of tokens `start …` of a run of blocks."""
        index = torch.arange(start, start + num_tokens)
        wanted = blocks[start // self.block_size : -(-(start + num_tokens) // self.block_size)]
        if not wanted or len(wanted) * self.block_size < start % self.block_size + num_tokens:
            raise ValueError(f"tokens {start} to {start + num_tokens} lie outside {len(blocks)} blocks")
        for block in (min(wanted), max(wanted)):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} of a cache with {self.num_blocks} blocks")
        offset = index - start // self.block_size * self.block_size
        return torch.tensor(wanted)[offset // self.block_size] * self.block_size + index % self.block_size

    @property
    def num_positions(self) -> int:
        """Positions that the tables of all layers have."""
        return min(place.rotation.num_positions for place in self.layers if place.rotation is not None)

    @property
    def cache_format(self) -> str:
        """Name of the format in eight bits that some layer's cache has; empty: none has."""
        found = (place.layout.quantization for place in self.layers)
        return next((str(how.format).removeprefix("torch.") for how in found if how is not None), "")

    def require(self, position: int) -> None:
        """Raises `PromptTooLong` if the table of some layer has no such position."""
        for rotation in {place.rotation for place in self.layers if place.rotation is not None}:
            rotation.require(position)


def require_plain_text_positions(root: Any, vocab_size: int) -> None:
    """Raises `NotMovable` unless a model of several positions per token (M-RoPE) numbers the tokens of text one by one.

    It is asked for the positions of one prompt of all tokens, without an image: tokens that begin an image must not
    change them either.
    """
    if not hasattr(root, "get_mrope_input_positions"):
        raise NotMovable(
            f"{type(root).__name__} does not tell the positions of its prompts (M-RoPE), so those of text are unknown"
        )
    try:
        positions, delta = root.get_mrope_input_positions(list(range(vocab_size)), [])
    except Exception as error:  # a model that looks for the images of its tokens
        raise NotMovable(
            f"{type(root).__name__} does not number a text that has tokens of images: {type(error).__name__}: {error}"[
                :400
            ]
        ) from error
    positions = torch.as_tensor(positions)
    if int(delta) or not bool((positions == torch.arange(vocab_size)).all()):
        raise NotMovable(f"{type(root).__name__} does not number the tokens of a text one by one (M-RoPE)")


def _block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    if kv_cache_config is None:
        return int(vllm_config.cache_config.block_size)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise NotMovable(f"the layers are in {len(groups)} groups with blocks of their own; only one can be moved")
    return int(groups[0].kv_cache_spec.block_size)


def _keeps_every_token(kv_cache_config: Any) -> bool:
    """Whether no block is freed since a window has left it: vLLM then calls all layers full attention."""
    if kv_cache_config is None:
        return True
    specs = (spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group))
    return all(type(spec).__name__ == "FullAttentionSpec" for spec in specs)


def _require_whole_tokens(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise NotMovable(f"{name} is {getattr(parallel, name)}: tokens of a block lie on several workers")


class Mover:
    """Carries out all moves of a step, layer by layer.

        slots of all moves:    │ rotated … rotated │ only copied … │        split into parts of bounded size
        for each part and layer:    read sources ─▶ rotate keys ─▶ write targets

    Slots that are read must not be written by another move of the step; a move may rotate keys in place. Nothing is
    written before all moves are known to be possible. A move by distance 0 copies bytes.
    """

    def __init__(self, places: KVLayout, part_tokens: int = 2048) -> None:
        """Buffers at most `part_tokens` tokens of one layer at a time."""
        assert part_tokens > 0
        self.places = places
        self.part_tokens = part_tokens

    def move(self, moves: Sequence[Move]) -> None:
        """Carries out moves, or none of them.

        Raises:
            PromptTooLong: a key's target position is not in the model's table; nothing was written.
            ValueError: a run outside its blocks, or a block that is read and written; nothing was written.
        """
        moves = [move for move in moves if move.num_tokens]
        for move in moves:
            for position in (move.position, move.position + move.distance):
                self.places.require(position)
                self.places.require(position + move.num_tokens - 1)
        if not moves:
            return
        moves.sort(key=lambda move: move.distance == 0)
        sources = torch.cat([self.places.slots(m.source_blocks, m.source_start, m.num_tokens) for m in moves])
        targets = torch.cat([self.places.slots(m.target_blocks, m.target_start, m.num_tokens) for m in moves])
        stays = targets == sources
        if torch.isin(targets[~stays], sources).any() or torch.isin(targets[stays], sources[~stays]).any():
            raise ValueError("a move reads a slot that another one writes")
        old = torch.cat([torch.arange(m.position, m.position + m.num_tokens) for m in moves])
        distance = torch.cat([torch.full((m.num_tokens,), m.distance) for m in moves])
        num_turned = sum(move.num_tokens for move in moves if move.distance)
        device = self.places.device
        sources, targets, old, new = (tensor.to(device) for tensor in (sources, targets, old, old + distance))
        for start, end in self._parts(num_turned, len(sources)):
            is_turned = start < num_turned
            self._move_part(sources[start:end], targets[start:end], (old[start:end], new[start:end]), is_turned)

    def _parts(self, num_turned: int, total: int) -> Iterator[tuple[int, int]]:
        for first, last in ((0, num_turned), (num_turned, total)):
            for start in range(first, last, self.part_tokens):
                yield start, min(start + self.part_tokens, last)

    def _move_part(self, sources: Tensor, targets: Tensor, positions: tuple[Tensor, Tensor], is_turned: bool) -> None:
        known: dict[tuple[KeyRotation, torch.dtype], Factors] = {}
        for place in self.places.layers:
            keys, values = place.layout.read(sources)
            if is_turned and place.rotation is not None:
                which = place.rotation, arithmetic(keys.dtype)
                if which not in known:
                    known[which] = place.rotation.factors(*positions, dtype=which[1])
                place.rotation.rotate(keys, known[which])
            place.layout.write(targets, keys, values)
