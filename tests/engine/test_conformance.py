"""Engines that must be alike to a face: our own, on models that differ, and one that copies keys."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.copying_engine import CopyingEngine
from support.engine_conformance import Reference, each_case, run_case
from support.engines import build_engine
from support.families import build
from support.inference_engine import InferenceEngine

from kvmosaic.model import LoadedModel


@cache
def model_of(family: str) -> LoadedModel:
    return LoadedModel.from_module(build(family, torch.float64))


def own_engine(family: str) -> InferenceEngine:
    return build_engine(model_of(family))


@pytest.mark.parametrize(("case", "family"), each_case(["llama", "gpt2", "bloom", "gemma3", "deepseek_v3", "llama4"]))
def test_own_engine(case: str, family: str) -> None:
    run_case(case, own_engine(family), Reference(model_of(family), 1e-9))


@pytest.mark.parametrize(("case", "family"), each_case(["llama", "gpt2", "bloom", "mistral"]))
def test_engine_that_copies_and_rotates_keys(case: str, family: str) -> None:
    run_case(case, CopyingEngine(model_of(family)), Reference(model_of(family), 1e-9))
