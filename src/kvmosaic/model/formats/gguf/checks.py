"""Checks of GGUF files: refuses what cannot be loaded before any weight is read."""

from __future__ import annotations

from importlib.util import find_spec

from kvmosaic.errors import UnsupportedModel
from kvmosaic.model.formats.gguf.file import GgufFile, missing_bytes

_PACKAGES = ("gguf", "accelerate")
_NOT_MODELS = {"general", "tokenizer"}
"""Entries of transformers' table of architectures that are not models."""


def check_gguf(file: GgufFile) -> None:
    """Refuses files that cannot be loaded: a missing package, an unknown architecture, a truncated file.

    Raises:
        UnsupportedModel: what is missing, and the fix.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UnsupportedModel(
            f"GGUF files are read with {' and '.join(_PACKAGES)}, and {' and '.join(missing)} is not installed; "
            "pip install 'kvmosaic[gguf]'"
        )
    known = _architectures()
    if _plain(file.architecture) not in {_plain(name) for name in known}:
        raise UnsupportedModel(
            f"{file.path} is a GGUF of architecture {file.architecture!r:.60}, which transformers does not read; it "
            f"reads {', '.join(sorted(known))}: give the model's folder of safetensors instead"
        )
    if file.architecture in _newly_read() and find_spec("kernels"):
        raise UnsupportedModel(
            f"{file.path} is a GGUF of architecture {file.architecture!r:.60}, for which transformers would download "
            "compiled code with the package kernels, and run it; uninstall kernels, or give the model's folder of "
            "safetensors"
        )
    _check_end(file)


def _architectures() -> set[str]:
    """Names of the architectures that transformers reads from GGUF, in its spelling."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return {*GGUF_SUPPORTED_ARCHITECTURES, *_newly_read()} - _NOT_MODELS


def _newly_read() -> set[str]:
    """Architectures of its newer reader, which looks for compiled code on the hub even when weights are dequantized."""
    try:
        from transformers.integrations.gguf import GGUF_ARCHS
    except ImportError:
        return set()
    return set(GGUF_ARCHS)


def _plain(architecture: str) -> str:
    return architecture.replace("-", "").replace("_", "").lower()


def _check_end(file: GgufFile) -> None:
    """Refuses a file that ends before its last weight, and unknown storage types."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    needed = file.num_bytes
    for tensor in file.tensors:
        try:
            numbers, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        except (ValueError, KeyError):
            raise UnsupportedModel(
                f"{file.path} stores the weight {tensor.name!r:.80} as type {tensor.kind}, which the installed package "
                "gguf does not know; upgrade it, or give a file of another quantization such as Q4_K_M or Q8_0"
            ) from None
        end = file.data_start + tensor.offset + -(-tensor.num_numbers // numbers) * num_bytes
        needed = max(needed, end)
    if needed > file.num_bytes:
        raise missing_bytes(file, needed)
