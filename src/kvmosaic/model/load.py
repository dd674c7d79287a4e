"""Model loading: from a folder, file or hub name to a `LoadedModel`, with the dtype and device chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from kvmosaic.errors import InvalidAdapter, InvalidConfig
from kvmosaic.model.cpu.prepack import Prepack, let_file_go
from kvmosaic.model.formats import LoadRequest, find_format
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.lora import merge, read_adapter


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    max_positions: int | None = None,
    prepack: Prepack = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
    merge_adapter: bool = False,
) -> LoadedModel:
    """Loads a model of transformers and detects how its attention works.

    Args:
        name_or_path: a folder with `config.json` and safetensors files, a GGUF file, or a name on the Hugging Face hub.
        dtype: "auto", "float32", "bfloat16", "float16", "float64" or a torch dtype. "auto" is the checkpoint's on
            CUDA; on a CPU it is bfloat16 for a 16-bit checkpoint if the CPU computes in bfloat16, else float32. A GGUF
            file of fewer bits counts as bfloat16.
        device: "auto" (CUDA if there is one, else the CPU) or a torch device such as "cuda:1".
        max_positions: the longest sequence to run; None: the model's limit.
        prepack: keep the weights of linear layers in the order in which a CPU multiplies bfloat16, which makes decoding
            about twice as fast, and fuse the small operations between them if a trial showed no difference.
            "auto": for bfloat16 on a CPU that computes in it; "always" or True: for any bfloat16 on a CPU; "never" or
            False.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the checkpoint. Off: such a model is refused.
        local_files_only: never access the hub, use only what was downloaded before.
        adapters: folders of low-rank adapters, by name; see `LoadedModel.from_module`.
        merge_adapter: add the updates of the only adapter to the weights, rounded to their dtype: ordinary prompts are
            computed by it then, too, and nothing is slower than without.

    Raises:
        InvalidAdapter: a folder without an adapter, or with one for another model; several to be merged.
        ModelNotFound: no such folder, file or name, no safetensors weights in it, or the hub cannot be reached.
        UnsupportedModel: transformers does not know the model, its attention cannot be reached, a GGUF file is damaged,
            or the package is missing that reads its weights.
        InvalidConfig: an unknown dtype or device, `max_positions` out of range, or `prepack` where it is not
            supported.
    """
    place = _device(device)
    read_adapters = {name: read_adapter(folder) for name, folder in adapters.items()}
    if merge_adapter and len(adapters) != 1:
        raise InvalidAdapter(f"{len(adapters)} adapters cannot be merged into the weights; give one")
    model_format, source = find_format(name_or_path)
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
    read = model_format.read(LoadRequest(source, dtype, place, options))
    merged = next(iter(read_adapters.values())) if merge_adapter else None
    if merged is not None:
        merge(read.module, merged)
        read_adapters = {}
    loaded = LoadedModel.from_module(
        read.module.to(place),
        read.tokenizer,
        max_positions=max_positions,
        prepack=prepack,
        adapters=read_adapters,
    )
    identity = read.fingerprint(loaded.fingerprint)
    if merged is not None:  # the fingerprint samples weights; the adapter's content counts as a whole
        identity = hashlib.sha256(f"{identity} {merged.digest}".encode()).hexdigest()
    loaded = replace(loaded, weights_note=read.note, fingerprint=identity)
    let_file_go(loaded.module)
    return loaded


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InvalidConfig(f"device is {device!r}; use 'auto', 'cpu', 'cuda' or for example 'cuda:1'") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"device is {device!r}, but torch finds no CUDA device here; use 'cpu' or 'auto'")
    return place
