"""GGUF files through transformers: dequantized weights, special tokens and generation settings of the file.

transformers builds the configuration and the weights, and ignores some entries of the file. Entries that change answers
are set here (the tokens that end an answer, scaled frequencies) or refused (an attention rule that the built model does
not have).
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvmosaic.errors import UnsupportedModel
from kvmosaic.model.formats.gguf.file import GgufFile, GgufTensor, check_gguf, read_gguf
from kvmosaic.model.quantized import bytes_text, make_plain

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvmosaic")

_FORMAT = "kvmosaic-gguf-1"
_SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens that end a text, a turn of a conversation, or a message to be continued: llama.cpp stops at each of them."""
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_STATED = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Attention rules of the built model, and the file's entries for them."""
_FREQUENCY_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


@contextmanager
def alone(file: GgufFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """A folder with only this file in it, and the option that names it.

    transformers also reads files next to a GGUF file: configurations, chat templates and adapters of other models.
    """
    with TemporaryDirectory(prefix="kvmosaic-gguf-") as folder:
        link = Path(folder) / "model.gguf"
        try:
            link.symlink_to(file.path.resolve())
        except OSError:  # no links here: the file where it is
            yield str(file.path.resolve().parent), {"gguf_file": file.path.name}
            return
        yield folder, {"gguf_file": link.name}


def dequantizing() -> dict[str, Any]:
    """The option for plain weights; otherwise transformers first looks for compiled code on the hub."""
    try:
        from transformers import GgufConfig
    except ImportError:  # transformers before 5.18 always gives plain weights
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


@contextmanager
def bar_in_terminals_only() -> Iterator[None]:
    """The progress bar of transformers' conversion in terminals only: its lines would fill a log."""
    from transformers import modeling_gguf_pytorch_utils as conversion

    bar = getattr(conversion, "tqdm", None)
    if bar is None:  # another version of transformers
        yield
        return
    conversion.tqdm = partial(bar, disable=None)
    try:
        yield
    finally:
        conversion.tqdm = bar


def stored_dtype(file: GgufFile) -> torch.dtype:
    """The dtype of the stored weights: float32 or float16 if all are, else bfloat16.

    Weights quantized to few bits have at most 16 significant bits, and bfloat16 keeps the range.
    """
    import torch

    kinds = _shares(file)
    if set(kinds) == {"F32"}:
        return torch.float32
    return torch.float16 if set(kinds) <= {"F16", "F32"} else torch.bfloat16


def quantization_name(file: GgufFile) -> str:
    """The most frequent storage type of a file's numbers, such as "Q4_1"."""
    return _shares(file).most_common(1)[0][0]


def _shares(file: GgufFile) -> Counter[str]:
    """Count of numbers by storage type; small one-dimensional tensors are always float32 and do not count."""
    from gguf.constants import GGMLQuantizationType

    shares: Counter[str] = Counter()
    for tensor in file.tensors:
        shares[GGMLQuantizationType(tensor.kind).name] += tensor.num_numbers
    return shares


def dequantized_text(file: GgufFile, dtype: torch.dtype) -> str:
    """Describes the dequantization of the weights, and the memory it takes."""
    stored = f"{bytes_text(file.num_bytes)} in the file, {quantization_name(file)}"
    plain = f"{bytes_text(file.num_numbers * dtype.itemsize)} of weights"
    return f"{file.path.name} ({stored}) is dequantized to {str(dtype).removeprefix('torch.')}: {plain}"


def describe(path: Path) -> Any:
    """The configuration of a GGUF file's model, with the dtype of its weights; no weights are read.

    Raises:
        ModelNotFound: there is no such file.
        UnsupportedModel: it cannot be loaded.
    """
    file = read_gguf(path)
    check_gguf(file)
    with alone(file) as (folder, named):
        config = read_config(file, folder, {"local_files_only": True, **named})
    config.dtype = stored_dtype(file)
    return config


def read_config(file: GgufFile, folder: str, options: Mapping[str, Any]) -> Any:
    """The configuration that transformers builds from a header, plus the entries it ignores.

    Raises:
        UnsupportedModel: transformers cannot build it, or ignores an attention rule.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, **options)
    except Exception as error:  # of many kinds: each family reads its own entries
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UnsupportedModel(f"transformers cannot read the header of {file.path} ({text})") from error
    settle_config(config, file)
    return config


def settle_config(config: Any, file: GgufFile) -> None:
    """Sets the special tokens of a configuration from the file; transformers keeps those of another model.

    Raises:
        UnsupportedModel: the file has an attention rule that the configuration lacks.
    """
    for name, key in _SPECIAL_TOKENS.items():
        setattr(config, name, file.metadata.get(key))
    for attribute, key in _STATED.items():
        _settle_rule(config, file, attribute, file.stated(key))
    _settle_scaling(config, file)


def _settle_rule(config: Any, file: GgufFile, attribute: str, stated: Any) -> None:
    """Checks a number of the file that a layer computes with; sets a missing window."""
    if not stated or not isinstance(stated, int | float):
        return
    built = getattr(config, attribute, None)
    if built is None and attribute == "sliding_window" and hasattr(config, attribute):
        config.sliding_window = int(stated)
    elif built is None or abs(built - stated) > 1e-3 * abs(stated):
        raise _unread(file, f"{attribute} {stated:g}", f"builds a model with {built}")


def _settle_scaling(config: Any, file: GgufFile) -> None:
    """Handles frequencies scaled for long prompts: one factor is set, other rules are refused."""
    kind, factor = file.stated("rope.scaling.type"), file.stated("rope.scaling.factor")
    has_long = any(_tensor(file, name) for name in _LONG_FACTORS)
    if _has_scaling(config) or not (has_long or (kind not in (None, "none") and factor not in (None, 1.0))):
        return
    parameters = getattr(config, "rope_parameters", None)
    if kind != "linear" or has_long or not parameters:
        raise _unread(file, f"frequencies scaled for long prompts ({kind or 'longrope'})", "leaves them out")
    # layers with windows may have frequencies of their own, which stay unchanged
    parameters.get("full_attention", parameters).update(rope_type="linear", factor=float(factor))


def _has_scaling(config: Any) -> bool:
    parameters: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)


def _unread(file: GgufFile, what: str, instead: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{file.path} states {what}, and transformers {instead}: it would answer as another model; give the model's "
        "folder of safetensors instead"
    )


def _tensor(file: GgufFile, name: str) -> GgufTensor | None:
    return next((tensor for tensor in file.tensors if tensor.name == name), None)


def settle_module(module: Any, file: GgufFile) -> None:
    """Makes a built model plain: no quantization marks, frequencies and generation settings from the file.

    Raises:
        UnsupportedModel: the file has frequency factors that the model lacks.
    """
    make_plain(module, module.dtype)
    _scale_frequencies(module, file)
    generation = module.generation_config
    ends = [token for name in _ENDS if (token := file.metadata.get(f"tokenizer.ggml.{name}")) is not None]
    generation.bos_token_id, generation.pad_token_id = module.config.bos_token_id, module.config.pad_token_id
    generation.eos_token_id = list(dict.fromkeys(ends)) or None
    for name, value in sampling_of(file).items():
        setattr(generation, name, value)


def sampling_of(file: GgufFile) -> dict[str, Any]:
    """How a file says that answers are sampled, in the names of a generation configuration."""
    stated = {name: file.metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    found = {name: value for name, value in stated.items() if value is not None}
    return {**found, "do_sample": True} if found.get("temperature") else found


def _scale_frequencies(module: Any, file: GgufFile) -> None:
    """Divides the frequencies by the factors that llama.cpp stores as a tensor (Llama 3.1 and later)."""
    tensor = _tensor(file, _FREQUENCY_FACTORS)
    if tensor is None or _has_scaling(module.config):
        return
    factors = _read_floats(file, tensor)
    buffers = [buffer for name, buffer in module.named_buffers() if name.endswith("inv_freq")]
    if bool((factors == 1).all()):
        return
    if not buffers or any(buffer.shape != factors.shape for buffer in buffers):
        raise _unread(file, f"{factors.numel()} factors for its frequencies", "builds other ones")
    for buffer in buffers:
        buffer.div_(factors.to(buffer))


def _read_floats(file: GgufFile, tensor: GgufTensor) -> torch.Tensor:
    import torch

    if tensor.kind != 0:
        raise _unread(file, f"factors for its frequencies of type {tensor.kind}", "leaves them out")
    with file.path.open("rb") as opened:
        opened.seek(file.data_start + tensor.offset)
        return torch.frombuffer(bytearray(opened.read(4 * tensor.num_numbers)), dtype=torch.float32)


def identity(file: GgufFile, fingerprint: str) -> str:
    """A fingerprint that two files share only if every byte is equal, regardless of their paths."""
    digest = blake3(max_threads=blake3.AUTO)
    digest.update_mmap(str(file.path))
    return hashlib.sha256(f"{_FORMAT} {digest.hexdigest()} {fingerprint}".encode()).hexdigest()
