"""A tiny random model with a tokenizer, in a folder: everything but sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder with three documents."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, text in {
        "ferry.txt": "The ferry goes to Oak Island.",
        "kiln.md": "The kiln of Brackwater burns lime.",
        "mill.htm": "The mill grinds oats.",
    }.items():
        (folder / name).write_text(text)
    return folder
