"""A model format of one's own: one class and one entry in `FORMATS`, and every face reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build

from kvmosaic.assembly import profile_place
from kvmosaic.errors import ModelNotFound
from kvmosaic.lab.capacity import read_model
from kvmosaic.model import load_model
from kvmosaic.model.formats import FORMATS, LoadRequest, ModelFormat, ReadModel, describe_formats

CHECKPOINT = FORMATS["checkpoint"]


class Pointer(ModelFormat):
    """A text file that names a folder."""

    title = "a pointer file"
    capacity_note = "counted as the folder that it points to"

    def find(self, name_or_path: str | Path) -> str | None:
        return str(name_or_path) if str(name_or_path).endswith(".pointer") else None

    def read(self, request: LoadRequest) -> ReadModel:
        read = CHECKPOINT.read(replace(request, source=self._target(request.source)))
        return replace(read, note="read through a pointer", fingerprint=lambda of_module: of_module[::-1])

    def read_config(self, source: str) -> Any:
        return CHECKPOINT.read_config(self._target(source))

    def display_name(self, source: str) -> str:
        return Path(source).stem

    def profile_path(self, source: str, file_name: str) -> Path | None:
        return Path(source).with_name(f"{Path(source).stem}.{file_name}")

    def files_in(self, folder: Path) -> Sequence[str]:
        return sorted(path.name for path in folder.glob("*.pointer"))

    def _target(self, source: str) -> str:
        return Path(source).read_text("utf-8")


@pytest.fixture
def pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    build("llama", torch.float32).save_pretrained(tmp_path / "folder")
    path = tmp_path / "small.pointer"
    path.write_text(str(tmp_path / "folder"), "utf-8")
    monkeypatch.setitem(FORMATS, "pointer", Pointer())
    return path


def test_it_is_loaded(pointer: Path) -> None:
    model, target = load_model(pointer, device="cpu"), load_model(pointer.parent / "folder", device="cpu")
    assert model.weights_note == "read through a pointer" and model.fingerprint == target.fingerprint[::-1]
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.module.lm_head.weight, target.module.lm_head.weight) and tokens.numel()


def test_it_is_planned(pointer: Path) -> None:
    facts, target = read_model(pointer), read_model(pointer.parent / "folder")
    assert facts.name == "small" and facts.layers == target.layers
    assert facts.note.startswith("counted as the folder")


def test_its_profile_and_help_are_known(pointer: Path) -> None:
    assert profile_place(pointer) == pointer.parent / "small.kvmosaic_profile.json"
    assert describe_formats() == "a model folder, a hub name, a GGUF file, a pointer file"
    with pytest.raises(ModelNotFound, match=r"a folder with POINTER files .* give one of them: small.pointer"):
        load_model(pointer.parent)
