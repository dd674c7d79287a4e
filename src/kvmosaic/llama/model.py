"""A GGUF file that llama.cpp runs, as the engine sees it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvmosaic.errors import InvalidConfig, KeepsState, KVMosaicError, UnsupportedModel
from kvmosaic.layers import LayerShape
from kvmosaic.layers.geometry import FULL, MaskSpec
from kvmosaic.layout import Layout, LayoutAdapter
from kvmosaic.llama.interface import bindings, build_name, build_text
from kvmosaic.llama.library import CACHE_TYPES, LlamaFile
from kvmosaic.llama.load_checks import TokenDifference, measure_positions, token_differences
from kvmosaic.llama.views import why_unreadable
from kvmosaic.model.formats.gguf.file import GgufFile, read_gguf
from kvmosaic.model.formats.gguf.tokenizer import read_file_tokenizer
from kvmosaic.model.formats.gguf.weights import alone, identity, sampling_of
from kvmosaic.model.quantized import bytes_text

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvmosaic.llama")

CACHE_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5}
"""Of one number, by the type of the cache."""
_QUANTIZED_WIDTH = 32
"""Numbers of a block of q8_0, which all lie in one head."""
ALL_LAYERS = -1
"""For `gpu_layers`."""
_MANY_POSITIONS = {8: "M-RoPE", 24: "vision RoPE", 40: "interleaved M-RoPE"}
"""Types of rotation in llama.cpp that take more than one position per token."""
_MAX_LAYERS = 512
"""`LLAMA_MAX_LAYERS`."""
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon")
_LATENT = "attention.key_length_mla"
_SCALED = "its rotation also scales keys (YaRN, LongRoPE), which is undone after a move; take kv_cache_dtype='f16'"
"""Why quantized keys of such a model are not moved."""
_CHUNKED = {"llama4"}
"""Architectures whose windows are chunks: a token sees none of the chunk before."""
_LONG_FACTORS = "rope_factors_long.weight"
_ORIGINAL_POSITIONS = "rope.scaling.original_context_length"


@dataclass(eq=False)
class LlamaModel:
    """A model with its tokenizer, its layers and its limits. Build it with `load_llama`."""

    file: LlamaFile
    tokenizer: Any
    """A transformers tokenizer, made from the file's vocabulary."""
    layers: tuple[LayerShape, ...]
    max_positions: int
    fingerprint: str
    cache_type: str
    """Type of cached keys and values."""
    eos_token_ids: tuple[int, ...]
    weights_note: str = ""
    generation_settings: Mapping[str, Any] = field(default_factory=dict)
    """How the file says that answers are sampled."""
    token_differences: tuple[TokenDifference, ...] = ()
    """Texts that become other tokens than in llama.cpp."""
    immovable_reason: str = ""
    """Why cached tokens cannot be used at another position, and not be composed; empty when they can."""

    engine_name = "llama.cpp"
    max_forward_tokens = None
    frequency_note = ""
    no_repair_reason = state_text = ""
    repairs_run_by_run = True
    has_bias = False
    state_bytes = map_bytes = 0
    map_shapes = ()
    device = "cpu"
    """Where logits are; the weights may be elsewhere."""
    no_window_reason = "llama.cpp keeps one position per token, and a rolling window moves them"
    no_scores_reason = "llama.cpp does not give its attention"
    adapters = MappingProxyType[str, LayoutAdapter]({})
    """Low-rank adapters: none, `open_model` refuses them."""
    num_fused = MappingProxyType[str, int]({})
    """Modules whose small operations are fused by us: none."""

    @property
    def vocab_size(self) -> int:
        """Numbers of a row of logits."""
        return self.file.vocab_size

    @property
    def window(self) -> int:
        """Tokens that a token sees in layers with a sliding window; 0 if no window ends within the positions used."""
        return self.file.window if self.file.window <= self.max_positions else 0

    def why_unreadable(self, layout: Layout) -> str:
        """Why a prompt so arranged cannot be read, and the way out; empty when it can."""
        return why_unreadable(layout, self.window)

    @property
    def is_movable(self) -> bool:
        """Whether every layer's keys may be used at another position than the one they were computed at."""
        return not self.immovable_reason

    @property
    def kind(self) -> str:
        """Architecture, and type of its weights, as llama.cpp names them."""
        return f"{self.file.architecture}, {self.file.weight_type}"

    @property
    def weights_text(self) -> str:
        """What runs its weights."""
        return f"in {build_text()}"

    @property
    def weight_device(self) -> str:
        """Where its weights are, "cpu" or "gpu"."""
        return "gpu" if self.file.is_on_gpu else "cpu"

    @property
    def engine_build(self) -> str:
        """Package and version of llama.cpp."""
        return build_name()

    @property
    def weight_type(self) -> str:
        """Of most weights."""
        return self.file.weight_type

    @property
    def num_parameters(self) -> int:
        """Count of numbers in all weights."""
        return self.file.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        return self.file.num_bytes

    def bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of keys and values that one token takes in all layers; with a dtype, if they were of this one."""
        bits = CACHE_BITS[self.cache_type] if dtype is None else 8.0 * dtype.itemsize
        return int(bits / 8 * sum(layer.numbers_per_token for layer in self.layers))


def load_llama(
    path: Path,
    *,
    max_positions: int | None = None,
    kv_cache_dtype: str = "auto",
    gpu_layers: int = 0,
) -> LlamaModel:
    """Loads a GGUF file into llama.cpp.

    Args:
        path: of the file.
        max_positions: the longest sequence to run; None: what the model was trained for.
        kv_cache_dtype: type of cached keys and values: "f16" (auto), "f32", "bf16", "q8_0".
        gpu_layers: number of layers on a GPU, if llama.cpp was built for one; ALL_LAYERS: all.

    Raises:
        ModelNotFound: there is no such file.
        UnsupportedModel: it is damaged, llama.cpp is missing or cannot run it, or its memory has another form
            (recurrent layers, several positions per token, latent attention, chunks).
        InvalidConfig: an unknown type, or `max_positions` out of range.
    """
    header, cache_type = read_gguf(path), cache_type_of(kv_cache_dtype)
    if header.stated(_LATENT):
        raise UnsupportedModel(
            f"{path.name} ({header.architecture}) has latent attention (MLA), which llama.cpp saves without values; "
            "take engine='transformers', with the folder of the model if it does not read this file"
        )
    if header.has_states:
        raise refused_state(header)
    _check_numbers(header)
    file = LlamaFile(path, gpu_layers=gpu_layers, entries=_factors(header, max_positions))
    try:
        return _loaded(header, file, max_positions, cache_type)
    except BaseException:
        file.close()
        raise


def _loaded(header: GgufFile, file: LlamaFile, max_positions: int | None, cache_type: str) -> LlamaModel:
    _check_memory(header, file)
    limit = file.max_positions
    if max_positions is not None and not 1 <= max_positions <= limit:
        raise InvalidConfig(f"max_model_len must be a whole number between 1 and {limit}, got {max_positions!r}")
    used = max_positions or limit
    if header.architecture in _CHUNKED and 0 < file.window <= used:
        raise UnsupportedModel(
            f"{file.path.name} ({header.architecture}) has chunks of {file.window:,} positions, and llama.cpp forgets "
            f"the chunk before; set max_model_len to at most {file.window - 1:,} (now {used:,}), or take "
            "engine='transformers'"
        )
    layers = layers_of(header, file.num_kv_heads, file.window)
    widths = {width for layer in layers for width in (layer.key_dim, layer.value_dim)}
    if cache_type == "q8_0" and any(width % _QUANTIZED_WIDTH for width in widths):
        raise InvalidConfig(
            f"llama.cpp quantizes keys and values in blocks of {_QUANTIZED_WIDTH} numbers, and the heads of "
            f"{file.path.name} have {', '.join(map(str, sorted(widths)))}; take kv_cache_dtype='f16'"
        )
    facts = measure_positions(file)
    file.shift_faults = facts.faults
    is_scaled = cache_type == "q8_0" and facts.faults.scales
    tokenizer = _tokenizer(header)
    differences = token_differences(file, tokenizer) if tokenizer is not None else ()
    if differences:
        logger.warning(
            "%s: %d of the texts tried become other tokens than in llama.cpp, and answers may be worse (kvmosaic check "
            "shows all): %s",
            file.path.name,
            len(differences),
            differences[0],
        )
    return LlamaModel(
        file,
        tokenizer,
        layers,
        used,
        _fingerprint(header, cache_type, _factors(header, max_positions)),
        cache_type,
        file.end_tokens(),
        weights_note=f"{file.path.name} ({bytes_text(header.num_bytes)}, {file.weight_type}) runs in {build_text()}",
        generation_settings=sampling_of(header),
        token_differences=differences,
        immovable_reason=_SCALED if is_scaled else facts.reason,
    )


def _check_numbers(header: GgufFile) -> None:
    """Refuses numbers at which llama.cpp ends the process in place of reporting an error."""
    limits = {"block_count": (1, _MAX_LAYERS), **dict.fromkeys(_EPSILONS, (0, math.inf))}
    for key, (least, most) in limits.items():
        if isinstance(value := header.stated(key), int | float) and not least <= value <= most:
            raise UnsupportedModel(
                f"{header.path} is damaged: its {header.architecture}.{key} is {value:g}; download it again"
            )


def refused_state(header: GgufFile) -> KeepsState:
    """The error for a file whose layers carry a state."""
    return KeepsState(
        f"{header.path.name} ({header.architecture}) has layers that carry a state, which llama.cpp keeps for whole "
        "texts only, so that no document can be cached apart; take engine='transformers', with the folder of the model "
        "if it does not read this file"
    )


def _check_memory(header: GgufFile, file: LlamaFile) -> None:
    """Refuses models whose memory in llama.cpp has no cells, or cells of another form."""
    name = f"{file.path.name} ({header.architecture})"
    if file.has_encoder:
        raise UnsupportedModel(f"{name} has an encoder; composed prompts are for models that read and write one text")
    if file.is_recurrent:
        raise refused_state(header)
    if kind := _MANY_POSITIONS.get(file.rope_type):
        raise UnsupportedModel(
            f"{name} has several positions per token ({kind}), and llama.cpp cannot move its keys; take "
            "engine='transformers', with the folder of the model if it does not read this file"
        )


def _factors(header: GgufFile, max_positions: int | None) -> dict[str, int]:
    """The entry by which llama.cpp takes one set of rotary factors in every context.

    Of models that have one for long texts and one for short ones, it takes that for long texts in contexts with more
    cells than `original_context_length`, whatever a prompt's length. Contexts that move documents are small.
    """
    if not any(tensor.name == _LONG_FACTORS for tensor in header.tensors):
        return {}
    used = max_positions or header.stated("context_length") or 0
    is_long = used > (header.stated(_ORIGINAL_POSITIONS) or used)
    return {f"{header.architecture}.{_ORIGINAL_POSITIONS}": 1 if is_long else 2**31 - 1}


def cache_type_of(kv_cache_dtype: str) -> str:
    """The type of cached keys and values.

    Raises:
        InvalidConfig: an unknown one.
    """
    cache_type = "f16" if kv_cache_dtype == "auto" else kv_cache_dtype
    if cache_type not in CACHE_TYPES:
        raise InvalidConfig(f"llama.cpp caches keys and values as {', '.join(CACHE_TYPES)}, got {cache_type!r:.80}")
    return cache_type


def geometry_of_file(header: GgufFile, kv_cache_dtype: str) -> tuple[str, float, tuple[LayerShape, ...]]:
    """Type of cached numbers, bytes of one, and the layers of a file, from its header; raises as `load_llama`."""
    if header.has_states:
        raise refused_state(header)
    cache_type = cache_type_of(kv_cache_dtype)
    return cache_type, CACHE_BITS[cache_type] / 8, layers_of(header)


def gpu_layers_of(device: str) -> int:
    """How many layers are to be on a GPU.

    Raises:
        InvalidConfig: a device that llama.cpp does not have here.
    """
    if device in ("auto", "cpu"):
        return 0 if device == "cpu" else ALL_LAYERS
    if device not in ("cuda", "mps"):
        raise InvalidConfig(
            f"llama.cpp runs on 'cpu', or on all GPUs that it sees ('cuda', 'mps', 'auto'), got device={device!r:.80}; "
            "CUDA_VISIBLE_DEVICES chooses among GPUs"
        )
    if not bindings().llama_supports_gpu_offload():
        raise InvalidConfig(
            f"device={device!r}: {build_name()} was built for CPUs only; install a build for your GPU, leave it out, "
            "or take engine='transformers'"
        )
    return ALL_LAYERS


def layers_of(header: GgufFile, num_kv_heads: int | None = None, window: int | None = None) -> tuple[LayerShape, ...]:
    """Geometry and mask of each layer, as a file states them.

    Args:
        header: of the file.
        num_kv_heads: key heads of a layer, if llama.cpp said so.
        window: positions of a sliding window, if llama.cpp said so.
    """
    num_heads = _stated_number(header, "attention.head_count")
    key_heads = num_kv_heads or _stated_number(header, "attention.head_count_kv", num_heads)
    head_dim = _stated_number(header, "embedding_length") // num_heads
    key_dim = _stated_number(header, "attention.key_length", head_dim)
    value_dim = _stated_number(header, "attention.value_length", head_dim)
    size = _stated_number(header, "attention.sliding_window", 0) if window is None else window
    mask = MaskSpec("window", size) if size else FULL
    return tuple(
        LayerShape(index, key_heads, key_dim, value_dim, False, index, num_heads, mask)
        for index in range(_stated_number(header, "block_count"))
    )


def _stated_number(header: GgufFile, key: str, default: int | None = None) -> int:
    """A number that the architecture states, the largest one if it is stated for each layer."""
    value = header.stated(key)
    value = max(value) if isinstance(value, list) and value else value
    if isinstance(value, int) and value > 0:
        return value
    if default is None:
        raise UnsupportedModel(f"{header.path} states no {header.architecture}.{key}; convert the model again")
    return default


def _tokenizer(header: GgufFile) -> Any:
    with alone(header) as (folder, named):
        try:
            return read_file_tokenizer(header, folder, {**named, "local_files_only": True, "trust_remote_code": False})
        except KVMosaicError:
            raise
        except Exception as error:  # its checks of a configuration raise errors of any kind
            raise UnsupportedModel(
                f"transformers cannot read the tokenizer of {header.path.name} ({header.architecture}): {error}"
            ) from error


def _fingerprint(header: GgufFile, cache_type: str, entries: Mapping[str, int]) -> str:
    """Two models share it only if every byte of their files is equal, and llama.cpp and the cache are the same."""
    read = "".join(f" {key}={value}" for key, value in entries.items())
    return identity(header, f"llama.cpp {build_name()} {cache_type}{read}")
