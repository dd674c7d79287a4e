"""`kvmosaic bench` with a GGUF file, and llama.cpp's own server beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.llama_engine import reader_file

from kvmosaic.errors import EngineError
from kvmosaic.prompt import Prompt


@pytest.fixture(autouse=True)
def needs_server() -> None:
    pytest.importorskip("xllamacpp")


@pytest.fixture(autouse=True)
def checkout_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def test_the_server_answers_prompts_and_reuses_beginnings() -> None:
    from benchmarks.engines import llama_server_peer

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
    from benchmarks.engines import main

    main([str(reader_file("Q8_0")), *options, "--dtype", "auto", "--dtype", "float32", "-o", str(tmp_path)])
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    rows = {(row["workload"], row["peer"], row["dtype"]) for row in report["rows"]}
    assert {("permuted", "kvmosaic", "Q8_0"), ("permuted", "llama.cpp server", "Q8_0")} < rows
    assert ("plain-8", "kvmosaic", "float32") in rows and ("plain-8", "llama.cpp server", "float32") not in rows
    assert all(row["cpu_seconds"] for row in report["rows"])
