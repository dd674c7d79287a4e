"""The registered attention function and its scope."""

from __future__ import annotations

from contextvars import copy_context

import pytest
import torch
from support.families import build
from support.loaded import loaded_family
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvmosaic.errors import ModelError
from kvmosaic.layers import AttentionCall
from kvmosaic.model import ATTENTION_NAME, LoadedModel, attention_scope, install

_TOKENS = torch.arange(3, 8)


def _own_value(call: AttentionCall) -> Tensor:
    return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)


def test_installing_twice_changes_nothing() -> None:
    install()
    first = AttentionInterface()[ATTENTION_NAME]
    install()
    assert AttentionInterface()[ATTENTION_NAME] is first


def test_transformers_builds_no_mask_for_our_attention() -> None:
    install()
    assert ATTENTION_NAME not in AttentionMaskInterface()
    masks = []
    model = loaded_family("gemma3")
    model.forward(_TOKENS, torch.arange(5), torch.tensor([4]), lambda call: masks.append(call.mask) or _own_value(call))
    assert masks == [None, None]


def test_every_layer_calls_its_receiver_once_and_in_order() -> None:
    model, calls = loaded_family("gpt_oss"), []
    logits = model.forward(
        _TOKENS, torch.arange(5), torch.tensor([0, 4]), lambda call: calls.append(call) or _own_value(call)
    )
    assert logits.shape == (2, 128)
    assert [call.layer_index for call in calls] == [0, 1]
    assert calls[0].query.shape == (5, 4, 16)
    assert calls[0].key.shape == calls[0].value.shape == (5, 2, 16)
    assert calls[0].sinks is not None and calls[0].sinks.shape == (4,)
    assert calls[0].scaling == pytest.approx(0.25)
    assert calls[0].softcap is None


def test_scale_and_soft_cap_are_the_models_own() -> None:
    calls: list[AttentionCall] = []
    model = loaded_family("gemma2")
    model.forward(_TOKENS, torch.arange(5), torch.tensor([4]), lambda call: calls.append(call) or _own_value(call))
    assert calls[0].softcap == 5.0
    assert calls[0].scaling == pytest.approx(256**-0.5)


def test_outside_a_scope_the_error_says_what_to_do() -> None:
    model = loaded_family("llama")
    with pytest.raises(ModelError, match=r"LoadedModel\.forward"):
        model.module(input_ids=_TOKENS[None])


def test_a_scope_ends_with_its_block_even_after_an_error() -> None:
    model = loaded_family("llama")

    def fail(call: AttentionCall) -> Tensor:
        raise ValueError("from the receiver")

    with pytest.raises(ValueError, match="from the receiver"):
        model.forward(_TOKENS, torch.arange(5), torch.tensor([4]), fail)
    with pytest.raises(ModelError):
        model.module(input_ids=_TOKENS[None])


def test_scopes_nest_and_do_not_leak_into_other_contexts() -> None:
    model, seen = loaded_family("llama"), []

    def outer(call: AttentionCall) -> Tensor:
        if call.layer_index == 0:
            model.forward(_TOKENS, torch.arange(5), torch.tensor([4]), lambda c: seen.append("inner") or _own_value(c))
        seen.append("outer")
        return _own_value(call)

    outside = copy_context()
    with attention_scope(outer):
        model.module(input_ids=_TOKENS[None])
        with pytest.raises(ModelError):
            outside.run(model.module, input_ids=_TOKENS[None])
    assert seen == ["inner", "inner", "outer", "outer"]


def test_a_receiver_may_answer_in_another_dtype_and_with_any_strides() -> None:
    model = LoadedModel.from_module(build("llama", torch.bfloat16))

    def wide(call: AttentionCall) -> Tensor:
        return _own_value(call).float().transpose(0, 1).contiguous().transpose(0, 1)

    logits = model.forward(_TOKENS, torch.arange(5), torch.tensor([4]), wide)
    assert logits.dtype is torch.bfloat16


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_families_that_drop_keywords_reach_the_receiver(family: str) -> None:
    calls: list[int] = []
    loaded_family(family).forward(
        _TOKENS, torch.arange(5), torch.tensor([4]), lambda call: calls.append(call.layer_index) or _own_value(call)
    )
    assert calls == [0, 1]
