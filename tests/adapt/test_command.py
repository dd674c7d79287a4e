"""`kvmosaic adapt` as a user runs it: documents and questions in, an adapter out that other commands take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import save_tiny_model
from typer.testing import CliRunner

from kvmosaic.cli import app

NAMES = "mill ferry tower garden bridge candle harbour meadow letter market".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapt")
    save_tiny_model(folder / "model")
    (folder / "texts").mkdir()
    for number, name in enumerate(NAMES):
        (folder / "texts" / f"{name}.txt").write_text(f"The {name} is {number} miles from here.")
    lines = [f"How far is the {name}?" for name in NAMES]
    (folder / "questions.txt").write_text("\n".join(lines))
    return folder


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_documents_and_questions_become_an_adapter_that_run_takes(place: Path) -> None:
    asked = ("--documents", place / "texts", "--questions", place / "questions.txt")
    code, output = run("adapt", place / "model", *asked, "-o", place / "out", "--steps", "2", "--prompt-documents", "2")
    assert "held-out divergence" in output and "equal greedy tokens" in output and code in (0, 1), output
    names = {"adapter_config.json", "adapter_model.safetensors", "kvmosaic_adapter.json", "training"}
    assert {each.name for each in (place / "out").iterdir()} == names
    question = ("--documents", place / "texts", "--question", "How far is the mill?", "--max-tokens", "2")
    code, output = run("run", place / "model", *question, "--adapter", f"near={place / 'out'}")
    assert code == 0, output
    code, output = run("run", place / "model", *question, "--adapter", place / "out", "--merge-adapter")
    assert code == 0, output
    ways = ("--repair", "none", "--strategies", "sequential", "--cases", "3")
    code, output = run("eval", place / "model", *asked, *ways, "--adapter", f"near={place / 'out'}", "--json")
    assert code == 0, output
    rows = json.loads(output[output.index("{\n") :])["rows"]
    assert [row["repair"] for row in rows] == ["full", "full, first document last", "none", "none + near"]


def test_generated_tasks_and_other_layers_can_be_learned(place: Path) -> None:
    asked = ("--tasks", "story,long(300)", "--cases", "8", "--steps", "1", "--targets", "up_proj, down_proj")
    asked += ("--sampled-answers", "1")
    code, output = run("adapt", place / "model", *asked, "--held-out-lessons", "3", "-o", place / "tasks")
    assert "held-out divergence" in output and code in (0, 1), output
    report = json.loads((place / "tasks" / "kvmosaic_adapter.json").read_text())
    assert report["settings"]["targets"] == ["up_proj", "down_proj"] and sum(report["questions"]) == 16
    assert report["settings"]["sampled_answers"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "story", "--data", "questions.json"), "are learned alone"),
        (("--tasks", "story", "--targets", "qkv_proj"), "has no linear layer called qkv_proj"),
        ((), "there is nothing to learn from"),
        (("--prompt-documents", "2,many"), "give whole numbers"),
        (("--prompt-documents", "2,,3"), "a part of it is empty"),
        (("--targets", "q_proj,"), "a part of it is empty"),
        (("--strategies", "shared," * 100_000), "characters; at most"),
        (("--strategies", "absolute"), "takes offsets"),
        (("--strategies", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_learned_is_said(place: Path, arguments: tuple[str, ...], message: str) -> None:
    code, output = run("adapt", place / "model", "-o", place / "none", *arguments)
    assert code == 2 and message in output and "Traceback" not in output, output


def test_a_model_that_asks_no_question_needs_some(place: Path) -> None:
    code, output = run("adapt", place / "model", "--documents", place / "texts", "-o", place / "none")
    assert code == 2 and "there is no question to learn from" in output, output


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (["missing"], "has no adapter_config.json"),
        (["=out"], "has no name"),
        (["a=x", "a=y"], "two adapters have the name 'a'"),
    ],
)
def test_adapters_that_cannot_be_served_are_said(place: Path, adapter: list[str], message: str) -> None:
    flags = [part for each in adapter for part in ("--adapter", each)]
    code, output = run("run", place / "model", "--question", "What?", "--documents", place / "texts", *flags)
    assert code == 2 and message in output, output
