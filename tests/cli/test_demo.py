from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from kvmosaic.console.demo import VISITS, Visit, VisitTimes, demo_heading, run_demo, times_table
from kvmosaic.console.folder import bundled_documents, read_folder
from kvmosaic.console.options import ModelOptions


def test_demo_shows_answers_moves_times_and_statistics(
    tiny_model: Path, notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    visits = (Visit("Where?", ("ferry", "kiln")), Visit("Who?", ("mill", "kiln", "ferry")))
    how = {"position_strategy": "sequential", "chunk_context": "system"}
    run_demo(ModelOptions(str(tiny_model), how), notes, visits)
    output = " ".join(capsys.readouterr().out.split())
    assert "Q Where?" in output and "Q Who?" in output
    assert re.search(r"= system \+ mill → kiln → ferry \+ question", output)
    assert output.count("first token after") == 2
    assert re.search(r"Who\? \d+ [\d.]+ m?s [\d.]+ m?s [\d.]+x", output)
    assert "5: 2 hits, 3 misses" in output
    assert "sequential positions" in output and "no network" not in output
    assert "cold: an ordinary prompt, its documents joined, with nothing remembered" in output
    assert "2 prompts read 3 documents 5 times" in output
    assert "computed a document 3 times and found one in the cache 2 times; 2 of these were read at another" in output


def test_times_on_60_columns_keep_their_numbers_whole() -> None:
    question = "In which month does the Fenbury Regatta take place?"
    console = Console(file=io.StringIO(), width=60)
    console.print(times_table([VisitTimes(question, 12_345, 0.0123, 0.0045)]))
    lines = console.file.getvalue().splitlines()
    assert re.fullmatch(r"In which month.*… +12,345 +12 ms +4\.50 ms +2\.7x *", lines[-1])
    assert max(map(len, lines)) <= 60


def test_heading_promises_no_network_only_for_the_bundled_reader() -> None:
    assert demo_heading(ModelOptions(), {}).endswith("model reader, shared positions, no network")
    assert demo_heading(ModelOptions("some/model"), {}).endswith("shared positions")


def test_every_visit_names_bundled_documents_in_its_own_order() -> None:
    names = {Path(document["id"]).stem for document in read_folder(bundled_documents())}
    assert all(set(visit.documents) <= names for visit in VISITS)
    assert len({visit.documents for visit in VISITS}) == len(VISITS) >= 5
