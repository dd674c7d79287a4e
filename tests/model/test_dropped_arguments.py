"""What a modelling file passes to its attention and we would drop: refused, or an error of the step, never left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import build
from transformers.models.llama import modeling_llama

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.engine.self_check.whole import run_self_check
from kvmosaic.errors import KVMosaicError, UnsupportedModel
from kvmosaic.model import LoadedModel

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Altered(modeling_llama.LlamaAttention):
    """An attention module that passes more than ours knows."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **named: Any) -> Any:
        length = hidden_states.shape[1]
        return super().forward(hidden_states, position_embeddings, *self.extra(length, attention_mask, named), **named)

    def extra(self, length: int, attention_mask: Any, named: dict[str, Any]) -> tuple[Any]:
        return (attention_mask,)


class WithBias(Altered):
    def extra(self, length, attention_mask, named):
        named["position_bias"] = torch.zeros(1, self.config.num_attention_heads, length, length)
        return (attention_mask,)


class WithOwnMask(Altered):
    def extra(self, length, attention_mask, named):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        return (torch.where((distance >= 0) & (distance < 8), 0.0, -torch.inf)[None, None],)


def altered(kind: type[Altered], index: int) -> Any:
    module = build("llama", torch.float32)
    module.model.layers[index].self_attn.__class__ = kind
    return module


@pytest.mark.parametrize("index", [0, 1])
def test_an_unknown_tensor_is_a_refusal_that_names_it(index):
    with pytest.raises(UnsupportedModel, match=f"layer {index} passes position_bias"):
        LoadedModel.from_module(altered(WithBias, index))


@pytest.mark.parametrize("index", [0, 1])
def test_a_mask_that_the_model_made_itself_is_a_refusal(index):
    with pytest.raises(UnsupportedModel, match=f"layer {index} passes its mask as a tensor"):
        LoadedModel.from_module(altered(WithOwnMask, index))


def test_a_refused_model_is_left_as_it_was():
    module = altered(WithBias, 0)
    before = module.config._attn_implementation
    with pytest.raises(UnsupportedModel):
        LoadedModel.from_module(module)
    assert module.config._attn_implementation == before


def test_a_layer_that_does_not_call_our_attention_fails_the_step_and_the_cache_is_as_before():
    module = build("llama", torch.float32)
    config = ChunkCacheConfig(chunk_cache_size="1MiB", block_size=4)
    prompt = Prompt.from_tokens([3, 4], [[5, 6, 7, 8, 9], [10, 11, 12]], [13, 14])
    engine_config = EngineConfig(request_cache_size="1MiB")
    with LLM(LoadedModel.from_module(module), chunk_cache_config=config, engine_config=engine_config) as llm:
        (sound,) = llm.generate(prompt, GREEDY)
        module.set_attn_implementation("eager")
        other = Prompt.from_tokens([3, 4], [[5, 6, 7, 8, 9], [20, 21, 22]], [13, 14])
        with pytest.raises(KVMosaicError, match="called our attention in 0 of 2 layers"):
            llm.generate(other, GREEDY)
        llm.engine.check_invariants()
        module.set_attn_implementation("kvmosaic")
        (again,) = llm.generate(other, GREEDY)
        actions = [segment.action for segment in again.reuse.segments if segment.kind == "chunk"]
        assert actions[1] == "computed", "what the failed step computed is not found"
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == sound.outputs[0].token_ids


def test_small_attention_chunks_pass_the_check_in_shared_positions():
    module = build("llama4", torch.float32, attention_chunk_size=8)
    result = run_self_check(LoadedModel.from_module(module))
    assert result.passed, result.reason
    assert not result.is_moved
