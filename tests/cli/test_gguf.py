"""The commands on a GGUF file: what they say about it, and that a plan needs no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.gguf import save_gguf
from typer.testing import CliRunner, Result

from kvmosaic.assembly import bundled_reader
from kvmosaic.cli import app
from kvmosaic.console.options import loading_text

DEVICE = ("--device-memory", "2GiB", "--documents", "100", "--tokens-per-document", "100", "--json")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "reader.Q8_0.gguf", kind="Q8_0")


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def planned(model: Path, *options: str) -> Any:
    result = called("plan", model, *DEVICE, *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["model"]


def test_run_answers_from_a_file_and_says_what_memory_it_takes(file: Path, tmp_path: Path) -> None:
    (tmp_path / "bellos.txt").write_text("Bellos is a donkey. It lives in the boathouse. Bellos eats carrots.")
    asked = ("--documents", tmp_path, "--question", "What does Bellos eat?", "--dtype", "float32")
    result = called("run", file, *asked, "--position-strategy", "shared", "--chunk-context", "system")
    assert result.exit_code == 0, result.output
    assert "carrots" in result.stdout
    assert "Q8_0) is dequantized to float32: 17.3 MB of weights" in " ".join(result.stderr.split())


def test_a_plan_of_a_file_is_that_of_its_folder(file: Path) -> None:
    ours, theirs = planned(file, "--engine", "transformers"), planned(bundled_reader())
    assert ours["name"] == "reader.Q8_0"
    for name in ("num_parameters", "weight_bytes", "kv_bytes_per_token", "max_positions"):
        assert ours[name] == theirs[name]


def test_a_file_that_cannot_be_read_ends_a_command_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model")
    for command in (("run", path, "a question"), ("plan", path, *DEVICE), ("check", path)):
        result = called(*command)
        assert result.exit_code != 0, result.output
        assert "is not a GGUF file" in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


def test_loading_a_file_says_how_large_it_is(file: Path) -> None:
    size = f"{file.stat().st_size / 1e6:,.1f} MB"
    assert loading_text(str(file)) == f"loading {file}, {size}"
    for name in ("reader", "owner/name", "a\0b", "x" * 5000):
        assert " MB" not in loading_text(name)
