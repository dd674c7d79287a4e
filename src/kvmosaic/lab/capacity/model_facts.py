"""Model facts: weights, and KV cache per token; read from a config.json, a GGUF file, a family, or a hub name.

And what this machine makes of them. torch is imported where a model is built or the device is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvmosaic.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from kvmosaic.layers.geometry import LayerShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Memory of a model."""

    name: str
    dtype: str
    """Of keys and values, and of weights."""
    element_bytes: float
    """Of one number of a key or value."""
    num_parameters: int
    weight_bytes: int
    """All weights, shared ones once."""
    max_positions: int | None
    layers: tuple[LayerShape, ...]
    state_bytes: int = 0
    """One state of all layers that carry one from token to token."""
    note: str = ""
    """What the reader of a plan should know about these numbers; empty if there is nothing."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that the engine keeps of every token, in all layers, whatever a window hides later."""
        return self._bytes(self.layers)

    @property
    def kv_bytes_unshared(self) -> int:
        """The same if every query head had a key head of its own: what grouped queries and latents save."""
        stored = (layer for layer in self.layers if layer.is_stored)
        numbers = sum(
            layer.kept_per_token if layer.num_chosen else 2 * layer.num_query_heads * _head_dim(layer)
            for layer in stored
        )
        return int(self.element_bytes * numbers)

    def seen_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of `num_tokens` that a token after them can see: a cache that evicts past windows."""
        numbers = sum(layer.kept_per_token * layer.mask.max_seen(num_tokens) for layer in self.layers)
        return int(self.element_bytes * numbers)

    def kinds(self) -> list[tuple[str, int, int]]:
        """Kinds of layers in the order of their first one: what they keep, how many, bytes per token of all of them."""
        found: dict[str, list[LayerShape]] = {}
        for layer in self.layers:
            found.setdefault(describe(layer), []).append(layer)
        return [(kind, len(layers), self._bytes(layers)) for kind, layers in found.items()]

    def _bytes(self, layers: Iterable[LayerShape]) -> int:
        return int(self.element_bytes * sum(layer.kept_per_token for layer in layers))


def describe(layer: LayerShape) -> str:
    """What a layer keeps, in words: "8 key heads of 128 (32 query heads), window 4,096"."""
    sees = "" if layer.mask.kind == "full" else f", {layer.mask.kind} {layer.mask.size:,}"
    if not layer.is_stored:
        return f"keys of an earlier layer{sees}"
    if layer.num_chosen:
        return f"one index key of {layer.key_dim}, by which the best {layer.num_chosen:,} keys are chosen"
    if layer.value_in_key:
        return f"latent of {layer.value_dim} + {layer.key_dim - layer.value_dim} rotary{sees}"
    size = f"{layer.key_dim}" if layer.key_dim == layer.value_dim else f"{layer.key_dim} and {layer.value_dim}"
    heads = f"{layer.num_kv_heads} key head{'s' if layer.num_kv_heads != 1 else ''} of {size}"
    return f"{heads} ({layer.num_query_heads} query heads){sees}"


def _head_dim(layer: LayerShape) -> int:
    return (layer.key_dim + layer.value_dim + 1) // 2


_BUNDLED = "reader"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MAX_CONFIG_BYTES = 2**24
_LIMITS = {
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "vocab_size": 2**26,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
}
_MAX_NUMBER = 2**40
_MAX_LAYERS = 1_024
"""Of whatever a family calls them: `num_hidden_layers`, `n_layer`, `decoder_layers`; each is built."""


def read_model(name_or_path: str | Path, *, dtype: str = "auto") -> ModelFacts:
    """Counts weights, keys and values of a model from its configuration; no weights are read.

    Args:
        name_or_path: a folder with a config.json, such a file, a GGUF file (only its header is read), "reader", a
            family of transformers such as "llama" (with the sizes that transformers gives it), or a name on the Hugging
            Face hub.
        dtype: of weights, keys and values; "auto": what the configuration says, or bfloat16.

    Raises:
        ModelNotFound: nothing of that name.
        InvalidConfig: an unknown dtype, or numbers beyond any model there is.
        UnsupportedModel: transformers does not know it, or the engine would refuse it.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise InvalidConfig(f"dtype is {dtype!r}; choose 'auto', " + ", ".join(repr(name) for name in _DTYPES))
    import torch

    from kvmosaic.lab.capacity.meta_count import build_without_memory, count

    config, name, note = _configuration(str(name_or_path))
    _check_numbers(config.to_dict())
    notes = [note] if note else []
    stored = _stored_dtype(config, name)
    if dtype == "auto" and stored is None:
        notes.append("the configuration names no dtype: bfloat16")
    if getattr(config, "quantization_config", None):
        notes.append("the checkpoint is quantized: weights are counted as they are without that; see --weights")
    chosen = getattr(torch, dtype if dtype != "auto" else stored or "bfloat16")
    return count(build_without_memory(config, chosen), name, "; ".join(notes))


def read_gguf_facts(path: Path, kv_cache_dtype: str = "auto") -> ModelFacts:
    """Facts of a GGUF file that llama.cpp runs as it is; only the header is read.

    Weights are counted in the bits of the file, and keys and values in those of the cache.

    Raises:
        ModelNotFound, UnsupportedModel, InvalidConfig: see `load_llama`.
    """
    from kvmosaic.assembly import engine_named
    from kvmosaic.model.formats.gguf.file import read_gguf
    from kvmosaic.model.formats.gguf.weights import quantization_name

    header, engine = read_gguf(path), cast(Any, engine_named("llama.cpp"))
    cache_type, element_bytes, layers = engine.geometry_of_file(header, kv_cache_dtype)
    return ModelFacts(
        name=header.name,
        dtype=quantization_name(header),
        element_bytes=element_bytes,
        num_parameters=header.num_numbers,
        weight_bytes=header.num_bytes - header.data_start,
        max_positions=header.stated("context_length"),
        layers=layers,
        note="weights are counted as the file has them; on top come cells of llama.cpp for up to "
        f"{engine.max_cells:,} tokens of documents, and its masks; keys and values in {cache_type}",
    )


def dtype_here(stored: str) -> str:
    """Returns the dtype that `load_model` chooses on this machine for a checkpoint in `stored`."""
    import torch

    from kvmosaic.model.transformers_loading import dtype_on

    return str(dtype_on(_device(), getattr(torch, stored))).removeprefix("torch.")


def memory_here() -> int:
    """Bytes of memory of this machine's device, as the engine counts it."""
    from kvmosaic.assembly import device_memory_bytes

    return device_memory_bytes(_device())


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _configuration(text: str) -> tuple[Any, str, str]:
    """Returns a configuration, its display name, and a note on its sizes, if there is one."""
    from transformers import CONFIG_MAPPING

    from kvmosaic.model.formats import find_format

    if not text.strip() or len(text) > 4_096 or "\0" in text:
        raise ModelNotFound(f"a model has a name of 1 to 4096 characters, got {text[:40]!r}; give a config.json")
    if text == _BUNDLED:
        from kvmosaic.assembly import bundled_reader

        return _from_file(bundled_reader() / "config.json"), _BUNDLED, ""
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{text} has no config.json; give a folder or file that describes a model")
        return _from_file(path / "config.json"), path.resolve().name, ""
    model_format, source = find_format(text)
    if not model_format.is_last:
        return model_format.read_config(source), model_format.display_name(source), model_format.capacity_note
    if path.is_file():
        return _from_file(path), path.resolve().parent.name or path.name, ""
    if text in CONFIG_MAPPING:
        note = f"the sizes that transformers gives {text!r}; give a config.json for those of a checkpoint"
        return _of_family(text, {}), text, note
    if text.endswith(".json") or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise ModelNotFound(
            f"there is no folder or file {text!r}, and transformers has no family of that name; give a folder with "
            "config.json, a config.json, a family such as 'llama' or 'qwen3', or a hub name such as 'owner/model'"
        )
    return _from_hub(text), text, ""


def _from_file(path: Path) -> Any:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise InvalidConfig(f"{path} has more than {_MAX_CONFIG_BYTES:,} bytes; a config.json has a few thousand")
    try:
        settings = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path} is not JSON ({error}); give the config.json of a model") from error
    kind = settings.pop("model_type", None) if isinstance(settings, dict) else None
    if not isinstance(kind, str):
        raise InvalidConfig(f"{path} does not name a model_type; give the config.json of a transformers model")
    _check_numbers(settings)
    return _of_family(kind, settings)


def _of_family(kind: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(kind, **settings)
    except Exception as error:  # checks of many kinds, in the code of each family
        text = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"transformers cannot read this configuration of {kind!r}: {text}") from error


def _from_hub(name: str) -> Any:
    from transformers import AutoConfig

    from kvmosaic.model.formats import hub_options

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **hub_options(name))
    except OSError as error:
        raise ModelNotFound(
            f"{name!r} is neither a folder here nor a model that can be fetched from the hub; download its config.json "
            "where there is a network, and give the file"
        ) from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"transformers cannot read the configuration of {name!r}: {text}") from error


def _check_numbers(settings: dict[str, Any], depth: int = 0) -> None:
    """Refuses sizes beyond any existing model, which would take minutes to build."""
    for name, value in settings.items():
        if isinstance(value, dict) and depth < 8:
            _check_numbers(value, depth + 1)
        elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > (limit := _limit_of(str(name))):
            raise InvalidConfig(f"{str(name)[:64]} is {value!r:.40} in this configuration; at most {limit:,} is read")


def _limit_of(name: str) -> int:
    return _MAX_LAYERS if re.search("layers?$", name) else _LIMITS.get(name, _MAX_NUMBER)


def _stored_dtype(config: Any, name: str) -> str | None:
    try:
        text_config = config.get_text_config()
    except ValueError as error:  # models that generate other things than text
        raise UnsupportedModel(f"{name} has no text model, or several: {' '.join(str(error).split())[:200]}") from error
    stored = getattr(config, "dtype", None) or getattr(text_config, "dtype", None)
    text = str(stored).removeprefix("torch.") if stored is not None else None
    return text if text in _DTYPES else None
