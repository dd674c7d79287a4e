"""A self-check that passed is believed again: of the same model, settings and code, and of nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.loaded import loaded_family

from kvmosaic import LLM, transformers_engine
from kvmosaic import llm as llm_module
from kvmosaic.attention import TorchBackend
from kvmosaic.engine import self_check
from kvmosaic.engine.self_check import Comparison, SelfCheck, kept_check
from kvmosaic.kept import VARIABLE

PASSED = SelfCheck((Comparison("attention", "the model's own code", 1e-7, 1e-3, "layer 1"),), True, note="equal scores")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def checked(result, *about):
    """What is found by a check that finds this, and how often it ran."""
    runs = []
    return kept_check(lambda: runs.append(1) or result, *about), len(runs)


def test_a_pass_is_kept_whole_for_its_model_settings_and_threads(monkeypatch):
    assert checked(PASSED, "model", "float32") == (PASSED, 1)
    assert checked(None, "model", "float32") == (PASSED, 0)
    assert checked(PASSED, "model", "bfloat16") == (PASSED, 1)
    assert checked(PASSED, "another", "float32") == (PASSED, 1)
    monkeypatch.setattr(self_check, "compute_threads", lambda machine: 10**6)
    assert checked(PASSED, "model", "float32") == (PASSED, 1)


WRONG = Comparison("attention", "the model's own code", 2.0, 1e-3)


@pytest.mark.parametrize(
    "failed", [replace(PASSED, error="no"), SelfCheck((), True), replace(PASSED, findings=(WRONG,))]
)
def test_nothing_but_a_pass_is_kept(failed):
    assert checked(failed, "model") == (failed, 1)
    assert checked(failed, "model") == (failed, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda told: told["findings"][0].update(difference=5.0),
        lambda told: told.update(findings=[]),
        lambda told: told.pop("is_moved"),
    ],
)
def test_a_damaged_verdict_is_not_believed(home, damage):
    checked(PASSED, "model")
    (kept,) = home.glob("checks/*/verdict.json")
    told = json.loads(kept.read_text())
    damage(told)
    kept.write_text(json.dumps(told))
    assert checked(PASSED, "model") == (PASSED, 1)
    assert checked(PASSED, "model") == (PASSED, 0), "it was written anew"


def test_a_folder_is_checked_once_and_what_others_may_have_changed_each_time(tmp_path, monkeypatch):
    model, runs = loaded_family("llama"), []
    monkeypatch.setattr(llm_module, "open_model", lambda *given, **options: model)  # reading one takes longer
    monkeypatch.setattr(transformers_engine, "run_self_check", lambda *given: runs.append(1) or PASSED)

    def num_checks(source, **settings):
        with LLM(source, chunk_cache_size="1MiB", request_cache_size="1MiB", **settings) as llm:
            assert llm.self_check == PASSED and llm.has_chunk_cache
        return len(runs)

    assert num_checks(tmp_path) == num_checks(tmp_path) == 1
    assert num_checks(tmp_path, prepack="never") == 2, "another setting"
    assert num_checks(model) == 3, "a model in memory, which others may have changed"
    assert num_checks(tmp_path, attention_backend=TorchBackend()) == 4, "a backend that others have made"
    assert num_checks(tmp_path, trust_remote_code=True) == 5, "code that comes with a model"
