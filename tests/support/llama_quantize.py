"""GGUF files that llama.cpp rounded: each tensor by its `ggml_quantize_chunk`, as `llama-quantize` chooses.

The prebuilt library leaves out the function that writes whole files. The files were compared with those of
`llama-quantize`: the same bytes in every tensor.
"""

from __future__ import annotations

import re
from ctypes import c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

from kvmosaic.llama.interface import bindings

KINDS = {"F16": 1, "Q8_0": 7, "Q4_K_M": 15}
"""Kinds of whole files, and their numbers in llama.cpp."""
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What tensors get whose rows are no multiple of 256."""


def quantize(source: Path, target: Path, kind: str) -> Path:
    """Writes a file again with weights of this kind; those of a quantized file are rounded once more."""
    reader = GGUFReader(source)
    metadata = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = metadata.pop("general.architecture").contents()
    writer = GGUFWriter(target, architecture)
    num_layers = metadata[f"{architecture}.block_count"].contents()
    for name, field in metadata.items():
        value = KINDS[kind] if name == "general.file_type" else field.contents()
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], element)
    has_output = any(tensor.name == "output.weight" for tensor in reader.tensors)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in tensor.shape[::-1]])
        stored = _stored(kind, tensor.name, numbers.shape, num_layers, has_output)
        writer.add_tensor(tensor.name, _rounded(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _stored(kind: str, name: str, shape: tuple[int, ...], num_layers: int, has_output: bool) -> GGMLQuantizationType:
    if len(shape) < 2 or "_norm" in name:
        return GGMLQuantizationType.F32
    if kind != "Q4_K_M":
        return GGMLQuantizationType[kind]
    found = re.match(r"blk\.(\d+)\.(attn_v|ffn_down)\.", name)
    layer = int(found[1]) if found else 0
    has_more = layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2
    is_output = name == "output.weight" or (name == "token_embd.weight" and not has_output)
    chosen = "Q6_K" if is_output or (found and has_more) else "Q4_K"
    return GGMLQuantizationType[_NARROW[chosen] if shape[-1] % 256 else chosen]


def _rounded(numbers: np.ndarray, stored: GGMLQuantizationType) -> np.ndarray:
    rows = np.ascontiguousarray(numbers, np.float32)
    if stored == GGMLQuantizationType.F32:
        return rows
    function = bindings().ggml_quantize_chunk
    function.restype = c_size_t
    function.argtypes = [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]
    size, num_bytes = GGML_QUANT_SIZES[stored]
    found = np.zeros((*rows.shape[:-1], rows.shape[-1] // size * num_bytes), np.uint8)
    count = rows.size // rows.shape[-1]
    assert function(stored, rows.ctypes.data, found.ctypes.data, 0, count, rows.shape[-1], None) == found.nbytes
    return found.view(np.float16) if stored == GGMLQuantizationType.F16 else found
