"""`kvmosaic eval`, from end to end on the bundled reader."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvmosaic.cli import app
from kvmosaic.lab.bench.results import can_plot
from kvmosaic.lab.eval.report import EvalReport, save_plot
from kvmosaic.lab.eval.rows import CaseResult, TaskRow
from kvmosaic.lab.eval.variants import FULL, Variant
from kvmosaic.model.cpu.prepack import cpu_has_bfloat16

FEW = ("eval", "--tasks", "one-hop(2),story", "--cases", "2", "--num-threads", "1", "--capacity", "64MiB")


def test_first_command_prints_tables_and_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    options = ("--repair", "none,first(8),full", "--contexts", "system,none", "-o", str(tmp_path))
    result = CliRunner().invoke(app, [*FEW, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "full attention" in result.output
    assert "first(8), shared/none" in result.output
    content = json.loads((tmp_path / "eval-reader.json").read_text())
    assert content["format"] == 2
    assert not list(temporary.iterdir())  # the log of a run that has ended
    assert content["machine"]["threads"] == 1
    assert content["machine"]["versions"]["torch"]
    assert f"M parameters, {'bfloat16' if cpu_has_bfloat16() else 'float32'}, cpu" in content["about"]
    rows = content["rows"]
    assert {row["task"] for row in rows} == {"one-hop(2)", "story"}
    assert len(rows) == 2 * (1 + 2 * 2 * 2) + 1
    assert sum(row["is_full"] for row in rows) == 2
    assert all(row["cases"] == 2 and len(row["answers"]) == 2 for row in rows)
    assert len(content["summaries"]) == 10
    assert len(content["cases"]) == 4
    markdown = (tmp_path / "eval-reader.md").read_text()
    assert markdown.startswith("# reader: answers from cached documents beside full attention")
    assert "| shared | none | first(8) |" in markdown
    assert len(list(tmp_path.glob("eval-reader.png"))) == can_plot()


def test_report_goes_to_standard_output_as_json() -> None:
    result = CliRunner().invoke(app, [*FEW, "--repair", "none", "--strategies", "shared", "--json", "--seed", "5"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["seed"], len(content["rows"])) == (5, 5)


def test_own_questions_are_read_from_a_file(tmp_path: Path) -> None:
    context = [["Ann Holm", ["Ann Holm lives in Tolbury.", " She plays the harp."]], ["Tolbury", ["It is a town."]]]
    record = {
        "_id": "1",
        "question": "Where does Ann Holm live?",
        "answer": "Tolbury",
        "context": context,
        "supporting_facts": [["Ann Holm", 0]],
        "type": "bridge",
        "level": "easy",
    }
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(record) + "\n")
    again = tmp_path / "again.jsonl"
    again.write_text(path.read_text())
    arguments = ["eval", "--data", str(path), "--data", str(again), "--repair", "none", "--strategies", "shared"]
    result = CliRunner().invoke(app, [*arguments, "--capacity", "64MiB", "--num-threads", "1", "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert {row["task"] for row in content["rows"]} == {"hotpotqa"}
    assert [row["cases"] for row in content["rows"]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "riddle"], "there is no task 'riddle'; choose from similar"),
        (["--repair", "some"], "repair is 'some'; choose one of none, first(k)"),
        (["--strategies", "absolute"], "the strategy 'absolute' is none of sequential, shared"),
        (["--contexts", "none,"], "a part of it is empty"),
        (["--data", "no/such.jsonl"], "no/such.jsonl"),
        (["--capacity", "lots"], "'lots' is not a size"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["eval", "--cases", "1", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def _report() -> EvalReport:
    ways = [
        FULL,
        *(
            Variant(strategy, "system", f"query({share / 100:g})")
            for strategy in ("shared", "sequential")
            for share in range(1, 11)
        ),
    ]
    rows = [
        TaskRow(way, "one|two", "exact", (CaseResult("1", "x", (n % 7) / 7, 0.01 + 0.001 * (n % 5), 5, 50),), 1.0)
        for n, way in enumerate(ways)
    ]
    machine = {"processor": "one", "cores": 2, "threads": 1, "load_average": None, "commit": None}
    return EvalReport("own", "about", 0, machine, [], rows, ["A note."], 1.0)


@pytest.mark.slow
@pytest.mark.skipif(not can_plot(), reason="matplotlib is missing")
def test_a_report_is_drawn_with_scores_and_without(tmp_path: Path) -> None:
    scored, path = _report(), tmp_path / "eval.png"
    readings = [replace(reading, score=None) for reading in scored.rows[0].readings]
    unscored = replace(scored, rows=[replace(scored.rows[0], readings=tuple(readings))])
    sizes = [save_plot(report, path).stat().st_size for report in (scored, unscored)]
    assert sizes[0] > sizes[1] > 1_000


def test_bars_in_names_do_not_break_the_markdown_table() -> None:
    markdown = _report().to_markdown()
    assert "A note." in markdown
    lines = [line.replace("\\|", "") for line in markdown.splitlines() if line.startswith("| one")]
    assert len(lines) == 21
    assert {line.count("|") for line in lines} == {15}
