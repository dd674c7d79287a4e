"""Where a nested forward must not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvmosaic.vllm.worker.extra_forward import (
    Scope,
    can_run,
    make_forward,
    scope_at_start,
)


def configuration(model: Any = None, parallel: Any = None, cache: Any = None, **fields: Any) -> Any:
    plain_model = {"is_encoder_decoder": False, "is_multimodal_model": False}
    plain_parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**plain_model, **(model or {})}),
        parallel_config=SimpleNamespace(**{**plain_parallel, **(parallel or {})}),
        cache_config=SimpleNamespace(**(cache or {})),
        speculative_config=fields.get("speculative"),
        lora_config=fields.get("lora"),
    )


ONE_GROUP = SimpleNamespace(kv_cache_groups=[object()])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline parallel"),
        ({"parallel": {"data_parallel_size": 2}}, "data parallel with experts"),
        ({"parallel": {"data_parallel_size": 2, "is_moe_model": True}}, "data parallel with experts"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill context parallel"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode context parallel"),
        ({"parallel": {"enable_eplb": True}}, "experts are balanced"),
        ({"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model": {"is_multimodal_model": True}}, "images"),
        ({"model": {"enable_prompt_embeds": True}}, "embeddings"),
        ({"model": {"runner_type": "pooling"}}, "answers nothing"),
        ({"cache": {"kv_sharing_fast_prefill": True}}, "kv_sharing_fast_prefill"),
        ({"speculative": object()}, "speculative"),
        ({"lora": object()}, "LoRA"),
    ],
)
def test_a_configuration_that_another_forward_would_break_is_refused(fields, reason):
    said = can_run(configuration(**fields), ONE_GROUP)
    assert reason in said
    scope = scope_at_start(configuration(**fields), ONE_GROUP)
    forward = make_forward(configuration(**fields), ONE_GROUP, SimpleNamespace())
    assert (forward == said) == (scope is Scope.CACHES)


def test_replicas_of_a_dense_model_and_tensor_parallel_are_not():
    parallel = {"data_parallel_size": 2, "is_moe_model": False, "tensor_parallel_size": 4}
    assert can_run(configuration(parallel=parallel), ONE_GROUP) == ""


@pytest.mark.parametrize(
    ("fields", "scope"),
    [
        ({"lora": object(), "speculative": object()}, Scope.MODEL),
        ({"lora": object(), "parallel": {"pipeline_parallel_size": 2}}, Scope.ATTENTION),
        ({"parallel": {"data_parallel_size": 2}}, Scope.ATTENTION),
        ({"parallel": {"pipeline_parallel_size": 2, "decode_context_parallel_size": 2}}, Scope.CACHES),
        ({}, Scope.MODEL),
    ],
)
def test_before_the_first_request_more_may_be_called_than_between_steps(fields, scope):
    assert scope_at_start(configuration(**fields), ONE_GROUP) is scope


def test_all_reasons_are_told():
    said = can_run(configuration(lora=object(), speculative=object()), SimpleNamespace(kv_cache_groups=[1, 2]))
    assert said.count(";") == 2 and said.startswith("2 groups")


def test_a_forward_that_cannot_be_made_is_a_reason_and_no_error():
    assert "AttributeError" in str(make_forward(configuration(), ONE_GROUP, SimpleNamespace()))
