"""Facts of a GGUF file that llama.cpp runs as it is, from its header; and how fast it runs here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from kvmosaic.assembly import MAX_LLAMA_CELLS
from kvmosaic.capacity.model_facts import ModelFacts
from kvmosaic.capacity.speed import Speed
from kvmosaic.llama.interface import build_text
from kvmosaic.llama.library import LlamaFile, Rows
from kvmosaic.llama.model import ALL_LAYERS, CACHE_BITS, cache_type_of, layers_of
from kvmosaic.model.formats.gguf.file import GgufFile, GgufTensor, read_gguf
from kvmosaic.model.formats.gguf.weights import quantization_name

_TOKEN_TABLE, _OUTPUT = "token_embd.weight", "output.weight"
_EXPERTS = "_exps."
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 4


def read_gguf_facts(path: Path, kv_cache_dtype: str = "auto") -> ModelFacts:
    """Counts weights in the bits of a file, and keys and values in those of the cache; only the header is read.

    Raises:
        ModelNotFound, UnsupportedModel, InvalidConfig: see `load_llama`.
    """
    header, cache_type = read_gguf(path), cache_type_of(kv_cache_dtype)
    sizes = dict(_sizes(header))
    named = {tensor.name: tensor for tensor in header.tensors}
    weight_bytes = sum(sizes.values())
    table = sizes[_TOKEN_TABLE] if _TOKEN_TABLE in sizes and _OUTPUT in sizes else 0
    output = named.get(_OUTPUT) or named.get(_TOKEN_TABLE)
    return ModelFacts(
        name=header.name,
        dtype=quantization_name(header),
        element_bytes=CACHE_BITS[cache_type] / 8,
        num_parameters=header.num_numbers,
        weight_bytes=weight_bytes,
        step_bytes=weight_bytes - table,
        linear_parameters=round(sum(_used(header, tensor) for tensor in header.tensors)),
        output_parameters=output.num_numbers if output is not None else 0,
        max_positions=header.stated("context_length"),
        layers=layers_of(header),
        note="weights are counted as the file has them; on top come cells of llama.cpp for up to "
        f"{MAX_LLAMA_CELLS:,} tokens of documents, and its masks; keys and values in {cache_type}",
    )


def measure_llama(path: Path, facts: ModelFacts) -> Speed:
    """How fast llama.cpp computes a prompt and an answer of this file here, some seconds; its weights are read.

    Raises:
        UnsupportedModel, ModelError: llama.cpp cannot run it.
    """
    file, threads = LlamaFile(path, gpu_layers=ALL_LAYERS), torch.get_num_threads()
    cells = 2 * _PROMPT_TOKENS
    try:
        context = file.context(num_cells=cells, num_sequences=1, num_threads=threads, max_rows=_PROMPT_TOKENS)
        try:
            context.forward([Rows([0] * _ANSWER_TOKENS, 0, 0, 1)])  # reads the weights for the first time
            context.untag(0)
            begin = time.perf_counter()
            context.forward([Rows([0] * _PROMPT_TOKENS, 0, 0, 1)])
            middle = time.perf_counter()
            for number in range(_ANSWER_TOKENS):
                context.forward([Rows([0], _PROMPT_TOKENS + number, 0, 1)])
            end = time.perf_counter()
        finally:
            context.close()
        device = "a GPU" if file.is_on_gpu else f"this CPU, {threads} threads"
    finally:
        file.close()
    return Speed(
        facts.flops(_PROMPT_TOKENS, 0, 1) / max(middle - begin, 1e-9),
        _ANSWER_TOKENS * facts.step_bytes / max(end - middle, 1e-9),
        f"{build_text()} on {device}, measured with this file",
        layer_seconds=0.0,
    )


def _sizes(header: GgufFile) -> Iterator[tuple[str, int]]:
    """Bytes of each tensor: up to where the next one begins."""
    ordered = sorted(header.tensors, key=lambda tensor: tensor.offset)
    ends = [tensor.offset for tensor in ordered[1:]] + [header.num_bytes - header.data_start]
    for tensor, end in zip(ordered, ends, strict=True):
        yield tensor.name, end - tensor.offset


def _used(header: GgufFile, tensor: GgufTensor) -> float:
    """Numbers that one token is multiplied with; of experts, its share."""
    if tensor.name in (_TOKEN_TABLE, _OUTPUT):
        return 0.0
    used, count = header.stated("expert_used_count"), header.stated("expert_count")
    return tensor.num_numbers * (used / count if _EXPERTS in tensor.name and used and count else 1.0)
