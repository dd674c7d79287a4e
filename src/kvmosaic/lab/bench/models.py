"""Benchmark models, opened and weighed, and the limits of this machine: the least time of their work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from kvmosaic.assembly import BUNDLED_READER, AnyModel, bundled_reader, open_model
from kvmosaic.errors import ModelNotFound
from kvmosaic.model import LoadedModel
from kvmosaic.model.formats.gguf.file import GgufFile, GgufTensor, read_gguf


def _shape(width: int, feed_forward: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 32_000,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16_384,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }


RANDOM_MODELS = {"random-0.1b": _shape(768, 2_048, 12, 12), "random-0.5b": _shape(1_280, 3_584, 24, 20)}
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
        with torch.random.fork_rng(devices=[]):  # torch's own random numbers go on as before
            torch.manual_seed(0)
            config = LlamaConfig(**RANDOM_MODELS[name], bos_token_id=None, eos_token_id=None)
            LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
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


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of several tries: other work on the machine only makes them slower."""

    read_bytes_per_second: dict[int, float]
    """By number of threads."""
    flops_per_second: dict[str, float]
    """By dtype, with the threads of the run."""
    threads: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the threads of the run read."""
        return self.read_bytes_per_second[self.threads]

    def first_token_seconds(self, weight: TokenCost, dtype: str, num_computed: int, num_prompt: int) -> float:
        """Returns the minimum time of a prompt: multiplications, or the bytes that must be read; without attention."""
        flops = 2.0 * (weight.linear_parameters * num_computed + weight.output_parameters)
        read = weight.step_bytes + weight.kv_bytes_per_token * num_prompt
        return max(flops / self.flops_per_second.get(dtype, float("inf")), read / self.bandwidth)

    def token_seconds(self, weight: TokenCost, num_context: int) -> float:
        """Returns the minimum time of one decode step: weights and KV cache are read once."""
        return (weight.step_bytes + weight.kv_bytes_per_token * num_context) / self.bandwidth

    def best_of(self, other: Limits) -> Limits:
        """Returns the faster of both in every limit: the same machine at another, perhaps less busy moment."""
        reads, flops = self.read_bytes_per_second, self.flops_per_second
        return Limits(
            {count: max(rate, other.read_bytes_per_second[count]) for count, rate in reads.items()},
            {dtype: max(rate, other.flops_per_second[dtype]) for dtype, rate in flops.items()},
            self.threads,
        )


def measure_limits(threads: int, dtypes: list[str], *, num_bytes: int = 2**28, tries: int = 15) -> Limits:
    """Reads a large buffer and multiplies square matrices.

    Args:
        threads: threads of the run; one thread is measured as well.
        dtypes: formats whose multiplications are measured.
        num_bytes: size of the buffer; much more than the caches of the processor.
        tries: how often each is measured.
    """
    before = torch.get_num_threads()
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    reads = {}
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            reads[count] = num_bytes / _least_seconds(buffer.sum, tries)
        flops = {dtype: _measure_flops(getattr(torch, dtype), tries) for dtype in dtypes}
    finally:
        torch.set_num_threads(before)
    return Limits(reads, flops, threads)


def _measure_flops(dtype: torch.dtype, tries: int) -> float:
    """Floating point operations per second of a square product."""
    size = 1_024
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _least_seconds(lambda: left @ right, tries)


def _least_seconds(run: Callable[[], object], tries: int) -> float:
    """The shortest of several runs, after one that does not count."""
    run()
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
