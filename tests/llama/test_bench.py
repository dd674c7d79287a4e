"""`kvmosaic bench` with a GGUF file: our engine in llama.cpp beside llama.cpp's own server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.llama_engine import reader_file
from typer.testing import CliRunner

from kvmosaic.bench.peers.outside import llama_server_peer
from kvmosaic.cli import app
from kvmosaic.errors import EngineError
from kvmosaic.prompt import Prompt


@pytest.fixture(autouse=True)
def needs_server() -> None:
    pytest.importorskip("xllamacpp")


def test_the_server_answers_prompts_and_reuses_beginnings() -> None:
    peer = llama_server_peer(Path(sys.executable), reader_file("Q8_0"), "Q8_0", threads=1, max_tokens=256)
    try:
        assert "xllamacpp" in peer.version
        one, longer = [*range(20, 60)], [*range(20, 60), *range(80, 90)]
        (first,) = peer.answer([Prompt.plain(one)], 4).readings
        (again,) = peer.answer([Prompt.plain(longer)], 4).readings
        assert (first.num_computed, first.num_answer) == (40, 4) and again.num_computed == 10
        assert first.token_seconds is not None and first.first_seconds > 0
        peer.reset()
        assert len(peer.answer([Prompt.plain([number, *one]) for number in range(5, 13)], 2).readings) == 8
        with pytest.raises(EngineError, match="refused a prompt"):
            peer.answer([Prompt.plain([5] * 4000)], 2)
    finally:
        peer.close()


def test_a_file_is_measured_in_its_own_numbers_and_dequantized(tmp_path: Path) -> None:
    options = ["--quick", "--workload", "permuted", "--workload", "plain", "--rounds", "1", "--num-threads", "1"]
    engines = ["--engine", "on", "--engine", "llama-server", "--dtype", "auto", "--dtype", "float32"]
    result = CliRunner().invoke(app, ["bench", str(reader_file("Q8_0")), *options, *engines, "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    rows = {(row["workload"], row["peer"], row["dtype"]) for row in report["rows"]}
    assert {("permuted", "kvmosaic", "Q8_0"), ("permuted", "llama.cpp server", "Q8_0")} < rows
    assert ("plain-8", "kvmosaic", "float32") in rows and ("plain-8", "llama.cpp server", "float32") not in rows
    assert all(row["cpu_seconds"] for row in report["rows"])


def test_a_missing_server_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", str(reader_file("Q8_0")), "--llama-server", "/nowhere/llama-server"])
    assert result.exit_code == 2 and "--llama-server takes a llama-server" in result.output
