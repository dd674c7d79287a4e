"""Facts of a GGUF file that llama.cpp runs as it is, from its header."""

from __future__ import annotations

from pathlib import Path

from kvmosaic.assembly import MAX_LLAMA_CELLS
from kvmosaic.capacity.model_facts import ModelFacts
from kvmosaic.llama.model import CACHE_BITS, cache_type_of, layers_of
from kvmosaic.model.formats.gguf.file import read_gguf
from kvmosaic.model.formats.gguf.weights import quantization_name


def read_gguf_facts(path: Path, kv_cache_dtype: str = "auto") -> ModelFacts:
    """Counts weights in the bits of a file, and keys and values in those of the cache; only the header is read.

    Raises:
        ModelNotFound, UnsupportedModel, InvalidConfig: see `load_llama`.
    """
    header, cache_type = read_gguf(path), cache_type_of(kv_cache_dtype)
    return ModelFacts(
        name=header.name,
        dtype=quantization_name(header),
        element_bytes=CACHE_BITS[cache_type] / 8,
        num_parameters=header.num_numbers,
        weight_bytes=header.num_bytes - header.data_start,
        max_positions=header.stated("context_length"),
        layers=layers_of(header),
        note="weights are counted as the file has them; on top come cells of llama.cpp for up to "
        f"{MAX_LLAMA_CELLS:,} tokens of documents, and its masks; keys and values in {cache_type}",
    )
