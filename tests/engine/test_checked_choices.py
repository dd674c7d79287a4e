"""The self-check finds a fault in any part of how keys are chosen, and says where equal scores decide."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import FAMILIES, build

from kvmosaic.attention import step
from kvmosaic.engine.self_check.whole import run_self_check
from kvmosaic.model import LoadedModel
from kvmosaic.model.cpu.prepack import cpu_has_bfloat16
from kvmosaic.rope import rotate

INDEXED = [name for name, family in FAMILIES.items() if "index_topk" in family.settings and not family.is_refused]
ONE = "deepseek_v32"


def load(dtype: torch.dtype = torch.float32, family: str = ONE, **changes: int) -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype, **changes))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (family, dtype) == (ONE, torch.bfloat16) else pytest.mark.slow)
        for family in INDEXED
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    ],
)
def test_sound_models_pass_and_keep_their_number_of_keys(family, dtype):
    model = load(dtype, family, index_topk=2048)
    result = run_self_check(model)
    assert result.passed, result.reason
    assert "chosen keys" in {finding.subject for finding in result.findings}
    assert {part.index_topk for part in model.module.modules() if hasattr(part, "index_topk")} == {2048}
    assert result.note == ""


@pytest.mark.skipif(not cpu_has_bfloat16(), reason="needs a processor with bfloat16")
@pytest.mark.slow
@pytest.mark.parametrize("family", INDEXED)
def test_models_with_packed_and_fused_layers_pass(family):
    model = LoadedModel.from_module(build(family, torch.bfloat16), prepack=True)
    result = run_self_check(model)
    assert result.passed, result.reason


def plain(scores_of, **changes):
    """The scores of an indexer, with a fault."""

    def scores(plan, parts, keys, query, weights, rows):
        found = scores_of(plan, parts, keys, query, weights, rows)
        turned = {"weights": torch.ones_like(weights), "sign": -weights}.get(changes["fault"], weights)
        return scores_of(plan, parts, keys, query, turned, rows).where(found.isfinite(), found)

    return scores


def one_fewer(scores, count):
    return step_best_keys(scores, count - 1)


def the_last_of_equal_ones(scores, count):
    return step_best_keys(scores.flip(1), count).flip(1)


step_best_keys = step.best_keys


@pytest.mark.parametrize("fault", ["weights", pytest.param("sign", marks=pytest.mark.slow)])
def test_wrong_scores_are_found(monkeypatch, fault):
    monkeypatch.setattr(step, "_index_scores", plain(step._index_scores, fault=fault))
    assert "chosen keys" in run_self_check(load()).reason


@pytest.mark.parametrize("wrong", [one_fewer, the_last_of_equal_ones])
def test_a_wrong_choice_is_found(monkeypatch, wrong):
    monkeypatch.setattr(step, "best_keys", wrong)
    assert "chosen keys" in run_self_check(load(index_n_heads=1)).reason


def test_queries_that_are_not_turned_are_found(monkeypatch):
    monkeypatch.setattr(
        step, "rotate", lambda x, tables: x if x.shape[2] == 16 else rotate(x, tables)
    )  # index keys are 16 numbers wide, latents 40
    assert "chosen keys" in run_self_check(load()).reason


def test_a_wrong_rotation_of_an_indexer_is_found():
    model = load()
    layers, last = model.layers[:-1], model.layers[-1]
    assert last.rotation is not None
    model.layers = (*layers, replace(last, rotation=replace(last.rotation, sign=-1)))
    assert f"rotation of layer {last.index} at position" in run_self_check(model).reason


def test_how_often_equal_scores_decide_is_said():
    result = run_self_check(load(index_n_heads=1))
    assert result.passed, result.reason
    assert "equal scores decide which keys are read in" in result.note
