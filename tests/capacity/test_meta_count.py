"""What is counted on the meta device against what the engine allocates, over every architecture."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.families import FAMILIES, HYBRIDS, configuration, each_family
from support.loaded import loaded_family

from kvmosaic.errors import UnsupportedModel
from kvmosaic.lab.capacity import ModelFacts
from kvmosaic.lab.capacity.meta_count import count
from kvmosaic.memory import BlockStorage

UNCOUNTED = {"jetmoe": "sends tokens to experts inside its attention, by their numbers"}
HIDDEN_WINDOW = {"moshi": "its configuration has a window that its masks do not use"}
FOUND_OUT_AT_LOAD = {
    "doge": "fails only when its attention is called with numbers",
    "bert": "its mask has to be asked",
    "roberta": "its positions have to be looked up",
}
LAYER_FIELDS = (
    *("index", "num_query_heads", "num_kv_heads", "key_dim", "value_dim", "source_layer"),
    "value_in_key",
)
SUPPORTED = [name for name, about in FAMILIES.items() if not about.is_refused and name not in UNCOUNTED]
REFUSED = [name for name, about in FAMILIES.items() if about.is_refused and name not in FOUND_OUT_AT_LOAD]


def count_family(family: str, dtype: torch.dtype = torch.float64, **changes: object) -> ModelFacts:
    about = (FAMILIES | HYBRIDS)[family]
    make = (
        getattr(transformers, about.architecture)._from_config
        if about.architecture
        else transformers.AutoModelForCausalLM.from_config
    )
    with torch.device("meta"):
        module = make(configuration(family, **changes), dtype=dtype)
    return count(module, family)


@pytest.mark.parametrize("family", each_family(SUPPORTED))
def test_counted_is_what_the_engine_allocates(family: str) -> None:
    facts, model = count_family(family), loaded_family(family)
    storage = BlockStorage(model.layers, 3, 4, model.dtype, model.device)
    tensors = [tensor for index in range(len(model.layers)) for tensor in storage._stored(index)]
    assert facts.kv_bytes_per_token * 3 * 4 == storage.num_bytes == sum(each.nbytes for each in tensors)
    for mine, theirs in zip(facts.layers, model.layers, strict=True):
        assert [getattr(mine, name) for name in LAYER_FIELDS] == [getattr(theirs, name) for name in LAYER_FIELDS]
        if family not in HIDDEN_WINDOW:
            assert mine.mask == theirs.mask
    assert facts.num_parameters == model.num_parameters
    weights = {id(each): each.nbytes for each in (*model.module.parameters(), *model.module.buffers())}
    # in float64, frequencies are wider in the models of the tests than in transformers' own
    assert facts.weight_bytes == pytest.approx(sum(weights.values()), rel=0.01)


@pytest.mark.parametrize("family", REFUSED)
def test_what_the_engine_refuses_cannot_be_planned(family: str) -> None:
    with pytest.raises(UnsupportedModel):
        count_family(family)


@pytest.mark.parametrize("family", sorted(UNCOUNTED))
def test_what_cannot_be_counted_says_what_to_do(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"cannot be counted .*; kvmosaic plan MODEL --question TEXT"):
        count_family(family)


def test_a_hybrid_model_is_counted_with_its_states() -> None:
    facts = count_family("qwen3_next", torch.float32)
    assert len(facts.layers) == 1 and facts.kv_bytes_per_token == 2 * 2 * 16 * 4
    # three layers: 4 heads of 8 x 8, and the last 4 inputs of 2 x 2 x 8 + 4 x 8 channels
    assert facts.state_bytes == 3 * (4 * 8 * 8 + 4 * 64) * 4


def test_grouped_queries_latents_and_shared_layers_in_numbers() -> None:
    # 2 layers, 4 query heads, 2 key heads of 16
    llama = count_family("llama", torch.bfloat16)
    assert llama.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert llama.kv_bytes_unshared == 2 * llama.kv_bytes_per_token
    # one latent of 32 and 8 rotary numbers for all heads
    assert count_family("deepseek_v3", torch.bfloat16).kv_bytes_per_token == 2 * (32 + 8) * 2
    # 4 layers, the last two read the keys of the first two
    assert [layer.kept_per_token for layer in count_family("gemma3n").layers] == [64, 64, 0, 0]


def test_a_window_is_counted_in_full_and_what_it_hides_is_told() -> None:
    facts = count_family("gemma2", torch.bfloat16)
    assert [(layer.mask.kind, layer.mask.size) for layer in facts.layers] == [("window", 8), ("full", 0)]
    assert facts.kv_bytes_per_token == 256
    assert facts.seen_bytes(100) == 128 * 8 + 128 * 100


def test_frequencies_that_change_with_length_do_not_need_numbers() -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    assert count_family("llama", rope_parameters=scaled).kv_bytes_per_token == count_family("llama").kv_bytes_per_token
