"""Frequencies that would change with the longest position of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import build

from kvmosaic import LLM, SamplingParams
from kvmosaic.errors import InvalidConfig
from kvmosaic.layers import AttentionCall
from kvmosaic.model import LoadedModel

_FACTORS = {"short_factor": [1.0 + 0.1 * step for step in range(8)], "long_factor": [2.0 + step for step in range(8)]}
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}}
_LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 256,
        "partial_rotary_factor": 1.0,
        **_FACTORS,
    },
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 1.0,
}
_LONG_MOE = {"rope_parameters": {**_LONG["rope_parameters"], "short_mscale": 1.1, "long_mscale": 1.3}}

KINDS = {
    "dynamic": ("llama", _DYNAMIC),
    "longrope": ("phi3", _LONG),
    "longrope_recomputed": ("phimoe", _LONG_MOE),
}


def _queries(model: LoadedModel, positions: list[int]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def record(call: AttentionCall) -> torch.Tensor:
        found.append(call.query.clone())
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)

    model.forward(torch.arange(3, 3 + len(positions)), torch.tensor(positions), torch.tensor([0]), record)
    return found


def _change(model: LoadedModel) -> float:
    """How much the first two queries change when a far token joins the batch."""
    near, far = _queries(model, [0, 200, 201]), _queries(model, [0, 200, 4000])
    return max(float((one[:2] - other[:2]).abs().max()) for one, other in zip(near, far, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_positions", [200, 4096])
def test_a_long_request_changes_no_other_one(kind: str, max_positions: int) -> None:
    family, settings = KINDS[kind]
    limits = {"max_position_embeddings": 256 if kind == "dynamic" else 4096}
    model = LoadedModel.from_module(build(family, **settings, **limits), max_positions=max_positions)
    assert model.is_movable
    assert model.max_positions == max_positions
    assert _change(model) == 0.0


def test_without_pinning_a_long_request_changes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmosaic.model.loaded.pin_frequencies", lambda *_: None)
    model = LoadedModel.from_module(build("llama", **_DYNAMIC, max_position_embeddings=256), max_positions=4096)
    assert _change(model) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_sequence_chooses_the_frequencies(kind: str) -> None:
    family, settings = KINDS[kind]
    limits = {"max_position_embeddings": 256 if kind == "dynamic" else 4096}
    short, long = (
        LoadedModel.from_module(build(family, **settings, **limits), max_positions=length) for length in (200, 4096)
    )
    assert short.fingerprint != long.fingerprint
    assert short.layers[0].rotation != long.layers[0].rotation


def test_static_frequencies_are_left_alone() -> None:
    def inv_freq(model: Any) -> torch.Tensor:
        return model.model.rotary_emb.inv_freq.clone()

    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 1024}
    for parameters in (yarn, {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}):
        module = build("llama", rope_parameters=parameters)
        before = inv_freq(module)
        model = LoadedModel.from_module(module)
        assert model.is_movable
        assert torch.equal(inv_freq(module), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pinned_model_cannot_be_pinned_for_another_length(kind):
    family, changes = KINDS[kind]
    module = build(family, torch.float32, max_position_embeddings=1024, **changes)
    first = LoadedModel.from_module(module, max_positions=512)
    again = LoadedModel.from_module(module, max_positions=512)
    assert again.layers == first.layers
    with pytest.raises(InvalidConfig, match="pinned for 512 positions already"):
        LoadedModel.from_module(module, max_positions=256)


def _answers(module: Any, max_positions: int | None) -> tuple[list[int], list[int], str]:
    """Ten greedy tokens by transformers and by us, and what our report says of them."""
    prompt = [5, 17, 99, 3, 54, 12, 8, 76, 23, 41]
    theirs = module.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None)
    with LLM(LoadedModel.from_module(module, max_positions=max_positions)) as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        return theirs[0, len(prompt) :].tolist(), list(output.outputs[0].token_ids), output.reuse.composition


def test_frequencies_for_long_texts_are_said_and_those_for_short_ones_are_those_of_generate() -> None:
    def module() -> Any:
        return build("phi3", torch.float32, max_position_embeddings=4096, **_LONG)

    theirs, ours, composition = _answers(module(), 256)
    assert ours == theirs and composition == "exact"
    theirs, ours, composition = _answers(module(), None)
    assert "frequencies are those for texts of more than 256 positions" in composition
    assert "max_model_len=256" in composition


@pytest.mark.parametrize("rope_type", ["yarn", "linear"])
def test_static_frequencies_have_no_note(rope_type: str) -> None:
    parameters = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10_000.0}
    if rope_type == "yarn":
        parameters["original_max_position_embeddings"] = 1024
    assert not LoadedModel.from_module(build("llama", rope_parameters=parameters)).frequency_note
