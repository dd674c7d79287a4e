"""Benchmark models: random ones made from a configuration, the bundled reader, or a folder; opened and weighed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from kvmosaic.assembly import BUNDLED_READER, AnyModel, bundled_reader, open_model
from kvmosaic.errors import ModelNotFound
from kvmosaic.model import LoadedModel
from kvmosaic.model.formats.gguf.file import GgufFile, GgufTensor, read_gguf

_SHARED = {"max_position_embeddings": 16_384, "rope_theta": 500_000.0, "tie_word_embeddings": True}
RANDOM_MODELS = {
    "random-0.1b": {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2_048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        **_SHARED,
    },
    "random-0.5b": {
        "vocab_size": 32_000,
        "hidden_size": 1_280,
        "intermediate_size": 3_584,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        **_SHARED,
    },
}
"""Llamas with grouped queries and a head size of 64."""
_TOKEN_TABLE, _OUTPUT = "token_embd.weight", "output.weight"
_EXPERTS = "_exps."


def model_folder(name: str, scratch: Path) -> Path:
    """The folder of a model; a random one is written into `scratch` first, in bfloat16.

    Raises:
        ModelNotFound: neither a random model, nor the reader, nor a folder.
    """
    if name == BUNDLED_READER:
        return bundled_reader()
    if name in RANDOM_MODELS:
        folder = scratch / name
        state = torch.get_rng_state()
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**RANDOM_MODELS[name], bos_token_id=None, eos_token_id=None))
        torch.set_rng_state(state)
        model.to(torch.bfloat16).save_pretrained(folder)
        return folder
    if not Path(name).is_dir():
        known = ", ".join(repr(known) for known in (BUNDLED_READER, *RANDOM_MODELS))
        raise ModelNotFound(f"there is no model {name!r}; give a folder, or one of {known}")
    return Path(name)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Work per token of a model, whichever engine runs it."""

    num_parameters: int
    linear_parameters: int
    """Parameters that every token is multiplied with, without the output layer."""
    output_parameters: int
    """Of the output layer, needed for rows with logits only."""
    kv_bytes_per_token: int
    element_bytes: float

    @property
    def step_bytes(self) -> int:
        """Minimum weight bytes read by one step."""
        return round((self.linear_parameters + self.output_parameters) * self.element_bytes)


def weigh(config: PretrainedConfig, element_bytes: int, kv_bytes_per_token: int) -> TokenCost:
    """Counts the parameters of a model by its configuration.

    Uses no loaded module: an engine may have converted its weights.
    """
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    tables = {id(m.weight): m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    head = module.get_output_embeddings().weight
    aside = tables | {id(head): head}
    total = sum(parameter.numel() for parameter in parameters.values())
    linear = total - sum(table.numel() for table in aside.values())
    return TokenCost(total, linear, head.numel(), kv_bytes_per_token, element_bytes)


def weigh_file(path: Path, kv_bytes_per_token: int) -> TokenCost:
    """Counts the parameters of a GGUF file by its header, in the mean size that they have there."""
    header = read_gguf(path)
    named = {tensor.name: tensor for tensor in header.tensors}
    output = named.get(_OUTPUT) or named.get(_TOKEN_TABLE)
    return TokenCost(
        header.num_numbers,
        round(sum(_used(header, tensor) for tensor in header.tensors)),
        output.num_numbers if output is not None else 0,
        kv_bytes_per_token,
        (header.num_bytes - header.data_start) / header.num_numbers,
    )


def _used(header: GgufFile, tensor: GgufTensor) -> float:
    """Numbers that one token is multiplied with; of experts, its share."""
    if tensor.name in (_TOKEN_TABLE, _OUTPUT):
        return 0.0
    used, count = header.stated("expert_used_count"), header.stated("expert_count")
    return tensor.num_numbers * (used / count if _EXPERTS in tensor.name and used and count else 1.0)


@dataclass(frozen=True, slots=True)
class Subject:
    """One model in the number formats that are measured."""

    source: Path
    """Its folder, or its GGUF file."""
    models: dict[str, AnyModel]
    """By number format; the weights of a GGUF file in llama.cpp have that of the file."""
    weights: dict[str, TokenCost]
    """By number format."""

    @property
    def is_file(self) -> bool:
        """Whether it is a GGUF file."""
        return self.source.is_file()

    @property
    def first(self) -> AnyModel:
        """Any of its models."""
        return next(iter(self.models.values()))


def open_subject(name: str, dtypes: Sequence[str], scratch: Path) -> Subject:
    """Loads a model in every dtype.

    Args:
        name: a GGUF file, or what `model_folder` takes.
        dtypes: for our own engines; "auto" runs a GGUF file in llama.cpp where it is installed.
        scratch: for a random model.

    Raises:
        KVMosaicError: it cannot be loaded.
    """
    source = Path(name) if name.endswith(".gguf") else model_folder(name, scratch)
    models: dict[str, AnyModel] = {}
    weights: dict[str, TokenCost] = {}
    for dtype in dict.fromkeys(dtypes):
        model = open_model(source, dtype=dtype, local_files_only=True)
        numbers = model.weight_type  # that of "auto" may be one of the others
        models[numbers], weights[numbers] = model, _weighed(model, source)
    return Subject(source, models, weights)


def _weighed(model: AnyModel, source: Path) -> TokenCost:
    kv_bytes = model.bytes_per_token()
    if isinstance(model, LoadedModel):
        return weigh(model.config, model.dtype.itemsize, kv_bytes)
    return weigh_file(source, kv_bytes)
