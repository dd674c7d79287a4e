"""`kvmosaic bench --quick`, from end to end on the bundled reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvmosaic.cli import app
from kvmosaic.errors import pip_install
from kvmosaic.lab.bench import campaign, results
from kvmosaic.lab.bench.measurement import BenchRow, measure
from kvmosaic.lab.bench.results import can_plot
from kvmosaic.lab.bench.workloads import Workload
from kvmosaic.model.transformers_loading import dtype_on

QUICK = (
    "bench",
    "--quick",
    "--num-threads",
    "1",
    "--rounds",
    "2",
    "--orders",
    "10",
    "--zipf-prompts",
    "2",
    "--answer",
    "4",
)


def test_quick_run_measures_every_workload_and_writes_its_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*QUICK, "--max-sharers", "2", "-o", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "bench-reader-quick.json").read_text())
    names = {row["workload"] for row in content["rows"]}
    assert {"question", "fresh", "repeated", "permuted", "known-2", "agents", "turns", "plain-8", "orders"} <= names
    assert {"zipf-0%", "zipf-50%", "zipf-80%", "zipf-95%", "shared-2", "private-2"} <= names
    assert {row["peer"] for row in content["rows"]} == {
        "kvmosaic",
        "kvmosaic, chunk cache off",
        "transformers generate",
    }
    assert all(row["first_share"] > 0 for row in content["rows"])
    assert "/ ours" in result.output
    assert (tmp_path / "bench-reader-quick.md").read_text().startswith("# reader: quick run")
    assert len(list(tmp_path.glob("*.png"))) == (4 if can_plot() else 0)

    def computed(workload: str) -> float:
        rows = [row for row in content["rows"] if row["workload"] == workload and row["peer"] == "kvmosaic"]
        return sum(rows[0]["num_computed"]) / len(rows[0]["num_computed"])

    assert computed("permuted") == computed("question") == content["sizes"]["question"]
    assert computed("zipf-0%") > computed("zipf-50%") > computed("zipf-95%")


def test_without_matplotlib_tables_and_json_still_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "can_plot", lambda: False)
    arguments = [*QUICK, "--workload", "question", "--engine", "on", "-o", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"][0]["workload"] == "question"
    assert pip_install("bench") in " ".join(result.stderr.split())
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "nonsense"), "no workload 'nonsense'"),
        (("--engine", "nonsense"), "no engine 'nonsense'"),
        (("no/such/model",), "no model 'no/such/model'"),
        (("--engine", "llama.cpp"), "no engine 'llama.cpp'; choose from on, off, transformers"),
    ],
)
def test_wrong_arguments_are_one_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--quick", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_dtype_given_under_two_names_is_measured_once() -> None:
    # the one that this CPU is fast in: the other one may take minutes
    name = str(dtype_on(torch.device("cpu"), torch.bfloat16)).removeprefix("torch.")
    arguments = [*QUICK, "--workload", "question", "--engine", "on", "--dtype", "auto", "--dtype", name, "--json"]
    rows = json.loads(CliRunner().invoke(app, arguments).stdout)["rows"]
    assert [row["dtype"] for row in rows] == [name]


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(workload: Workload, *others: Any) -> list[BenchRow]:
        if workload.name == "fresh":
            raise KeyboardInterrupt
        return measure(workload, *others)

    monkeypatch.setattr(campaign, "measure", interrupted)
    result = CliRunner().invoke(app, [*QUICK, "--engine", "on", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "bench-reader-quick.json").read_text())
    assert [row["workload"] for row in content["rows"]] == ["question"]
    assert "Interrupted: what came later was not measured." in content["notes"]
