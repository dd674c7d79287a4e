"""Tuning from end to end: a model is asked, its profile is written, and everything that opens it follows it."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters import random_adapter
from support.server import ServeCommand
from support.tiny import save_tiny_model
from typer.testing import CliRunner

from kvmosaic import LLM, ChunkCacheConfig, SamplingParams
from kvmosaic.cli import app
from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import prompt_of, score
from kvmosaic.lab.eval.measure import EvalModel
from kvmosaic.lab.eval.tuner import Tuning, goal_of, tune
from kvmosaic.lab.eval.variants import FULL, Variant, variants
from kvmosaic.model import load_model
from kvmosaic.model.lora import write_adapter
from kvmosaic.prompt import Document
from kvmosaic.tuned_settings import PROFILE_NAME, read_profile

SMALL = {"capacity": "16MiB", "dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


def answers_of(llm: LLM, case: Case, repair: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=case.answer_tokens, repair=repair)
    return llm.generate(prompt_of(llm, case), params, position_strategy="sequential")[0].outputs[0].text.strip()


@pytest.fixture(scope="module")
def cases(model: Path) -> list[Case]:
    """Questions whose right answer is that of full attention, which isolated documents do not give."""
    found = []
    with LLM(model, dtype="float32", chunk_cache_config=ChunkCacheConfig(chunk_context="system")) as llm:
        for number in range(40):
            documents = tuple(
                Document(f"House {number + at} is {colour}.") for at, colour in enumerate(("red", "blue"))
            )
            case = Case(f"case-{number}", "colours", f"What is {number}?", ("?",), documents, answer_tokens=12)
            full, alone = answers_of(llm, case, "full"), answers_of(llm, case, "none")
            if full and score("exact", full, (full,)) == 1 and score("exact", alone, (full,)) == 0:
                found.append(replace(case, answers=(full,)))
            if len(found) == 2:
                break
    assert len(found) == 2
    return found


def tuning(model: Path | str, cases: list[Case], repairs: str, loss: float, **options: object) -> Tuning:
    chosen = variants(repairs.split(" "), ("sequential",), ("system",))
    opening = EvalModel(str(model), **SMALL)
    return Tuning(opening, cases, chosen, goal_of(loss), seed=3, with_full="full" in repairs, **options)


def test_a_model_is_asked_and_opened_as_its_profile_says(
    model: Path, cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    assert tune(tuning(folder, cases, "none full", loss=0.0))
    told = capsys.readouterr().out
    assert "▸ full attention" in told and "colours 0.0%" in told and "written:" in told
    profile = read_profile(folder / PROFILE_NAME)
    assert (profile.repair, profile.position_strategy, profile.model) == ("full", "sequential", "model")
    assert (profile.seed, profile.goal.is_reached, profile.ratio) == (3, True, 1.0)
    assert [(task.task, task.cases, task.accuracy) for task in profile.tasks] == [("colours", 2, 1.0)]
    with LLM(folder, dtype="float32") as llm:
        assert llm.profile == profile
        params = SamplingParams(temperature=0, max_tokens=12)
        for case in cases:
            (output,) = llm.generate(prompt_of(llm, case), params)
            assert output.outputs[0].text.strip() == case.answers[0]
    asked = ("run", str(folder), "House 1 is red. ## House 2 is blue. ## What? ## Why?", "--chunk-separator", "##")
    asked += ("--max-tokens", "1")
    shown = CliRunner().invoke(app, [*asked, "--dtype", "float32"])
    assert "kvmosaic_profile.json of" in shown.stderr and "full:" in shown.stdout, shown.output
    composed = ("--profile", "none", "--chunk-context", "companions")  # else what is short is read in full
    shown = CliRunner().invoke(app, [*asked, "--dtype", "float32", *composed])
    assert "profile" not in shown.stderr and "full:" not in shown.stdout, shown.output


def test_a_profile_names_the_adapter_that_it_was_measured_with(
    model: Path, cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(model, tmp_path / "model")
    adapter = random_adapter(load_model(model, dtype="float32").module)
    write_adapter(adapter, copied / "near", "tiny")
    ways = (FULL, Variant("sequential", "system", "none", "near"))
    opening = EvalModel(str(copied), **SMALL, adapter=(str(copied / "near"),))
    assert tune(Tuning(opening, cases, ways, goal_of(0.02), seed=3, is_best_effort=True))
    assert "none + near" in capsys.readouterr().out
    profile = read_profile(copied / PROFILE_NAME)
    assert (profile.adapter, profile.adapter_digest) == ("near", adapter.digest)
    moved = copied.rename(tmp_path / "elsewhere")
    with LLM(moved, dtype="float32", self_check=False) as llm:
        assert llm.profile == profile and list(llm.model.adapters) == ["near"]


def test_nothing_is_written_if_nothing_is_good_enough_unless_that_is_wanted(
    model: Path, cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "profile.json"
    asked = tuning(model, cases, "none", loss=0.5, file=place)
    assert not tune(asked) and not place.exists()
    told = " ".join(capsys.readouterr().out.split())
    assert "colours fails: 0.0% of full attention" in told and "nothing is written; --best-effort" in told
    assert tune(replace(asked, is_best_effort=True), as_json=True)
    profile = read_profile(place)
    assert (profile.repair, profile.goal.is_reached, profile.ratio) == ("none", False, 0.0)
    found = json.loads(capsys.readouterr().out)
    assert found["profile"] == profile.to_dict() and found["written"] == str(place)
    assert found["said"][0].startswith("Nothing with at most 100.0% work reaches 50.0%")


def test_a_place_that_cannot_be_written_is_told_before_anything_is_asked(model: Path, tmp_path: Path) -> None:
    for name, place in (("some/model", None), (model, tmp_path), (model, tmp_path / "missing" / "profile.json")):
        with pytest.raises(InvalidConfig, match="--profile FILE"):
            tune(tuning(name, [], "none", loss=0.0, file=place))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="whoever may write everywhere is never refused")
def test_a_folder_that_cannot_be_written_is_told(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(InvalidConfig, match="cannot be written; name a file"):
            tune(tuning(folder, [], "none", loss=0.0))
    finally:
        folder.chmod(stat.S_IRWXU)


def test_the_command_asks_the_reader_and_the_server_follows_what_it_found(tmp_path: Path) -> None:
    place = tmp_path / "reader.json"
    asked = ("tune", "reader", "--tasks", "one-hop(2)", "--cases", "2", "--dtype", "float32", "--capacity", "64MiB")
    chosen = ("--repair", "first(2)", "--strategies", "sequential", "--best-effort", "--profile", str(place))
    result = CliRunner().invoke(app, [*asked, *chosen])
    assert result.exit_code == 0, result.output
    date = read_profile(place).date
    with ServeCommand("--profile", str(place)) as command:
        command.until_ready()
        assert f"profile    of {date}: sequential positions, repair first(2)" in command.log
        assert f"INFO reader.json of {date} is followed" in command.log


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--loss", "2"), "--loss must be a number from 0 to 1, got 2.0"),
        (("--loss", "nan"), "--loss must be a number from 0 to 1"),
        (("--max-work", "-1"), "--max-work must be a number from 0 to 100"),
        (("--repair", "most"), "choose one of none, first(k)"),
        (("--tasks", "three-hop"), "there is no task 'three-hop'"),
        (("--profile", "/nowhere/profile.json"), "cannot be written; name a file"),
    ],
)
def test_what_cannot_be_asked_is_one_line(options: tuple[str, str], told: str) -> None:
    result = CliRunner().invoke(app, ["tune", "reader", *options])
    assert result.exit_code == 2 and told in result.stderr and len(result.stderr.splitlines()) == 1, result.output
