"""Attention that is written into its module: opened, found out about, and checked against its own code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.families import build
from support.loaded import dense_layout, dense_logits, loaded_family, random_prompt
from support.reference import eager_logits
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from kvmosaic.attention import choose_backend
from kvmosaic.errors import InvalidConfig, NativeUnavailable, UnsupportedModel
from kvmosaic.layers import DistanceBias
from kvmosaic.layout import arrange, dense
from kvmosaic.model import LoadedModel
from kvmosaic.model.adapters import installed_adapters
from kvmosaic.model.probe.adapter_layers import read_bias
from kvmosaic.prompt import Prompt, Segment, SegmentKind

if not hasattr(modeling_bloom, "_get_alibi_slopes"):
    pytest.skip("Bloom of transformers before 5.21 has other functions", allow_module_level=True)

HEADS = st.sampled_from([1, 3, 4, 8, 12, 16, 32, 71, 112])


def slopes_of(num_heads: int) -> torch.Tensor:
    return modeling_bloom._get_alibi_slopes(num_heads, torch.device("cpu"))


@given(HEADS, st.integers(2, 2100), st.booleans())
def test_slopes_are_read_off_a_bias_that_counts_from_either_end(num_heads, count, from_the_end):
    slopes = slopes_of(num_heads)
    steps = torch.arange(count) - (count - 1 if from_the_end else 0)
    assert read_bias(slopes[:, None] * steps, torch.float32, 0.5) == DistanceBias(tuple(slopes.tolist()), None, 0.5)


@given(HEADS, st.sampled_from([torch.bfloat16, torch.float16]))
def test_a_bias_rounded_like_the_model_gives_nearly_the_slopes_before_rounding(num_heads, dtype):
    slopes, steps = slopes_of(num_heads), torch.arange(2100)
    bias = read_bias((slopes[:, None] * steps).to(dtype), dtype)
    assert bias is not None and bias.rounding is None
    assert bias.slopes == pytest.approx(slopes.tolist(), rel=torch.finfo(dtype).eps / 4)


@given(HEADS)
def test_a_bias_in_float32_inside_a_float64_model_is_the_models(num_heads):
    numbers = (slopes_of(num_heads)[:, None] * torch.arange(2100)).double()
    bias = read_bias(numbers, torch.float64)
    assert bias is not None and bias.rounding in (None, torch.float32)
    positions = torch.arange(2100)
    assert torch.equal(bias.between(positions[:1], positions[None], torch.float64)[:, 0], numbers)


@given(HEADS.filter(lambda count: count != 1))
def test_a_bias_in_bfloat16_inside_a_finer_model_is_rounded(num_heads):
    numbers = build_alibi_tensor(torch.ones(1, 2100, dtype=torch.long), num_heads, torch.float32).squeeze(1)
    bias = read_bias(numbers, torch.float32)
    assert bias is not None and bias.rounding is torch.bfloat16
    positions = torch.arange(2100)
    written = bias.between(positions[-1:], positions[None], torch.float64)[:, 0]
    assert torch.equal(written + numbers[:, -1:].double(), numbers.double()), "as the model rounds it, far away too"
    within, last = bias.of_run(2000, torch.tensor([100]), torch.tensor([2099]), torch.float64)
    assert torch.equal(within + last.T, written[:, 100:])


@pytest.mark.parametrize("change", [lambda x: x**2, lambda x: x.abs().log1p(), lambda x: x + 1, lambda x: x * 0])
def test_other_biases_are_not_believed(change):
    numbers = slopes_of(4)[:, None] * torch.arange(300)
    assert read_bias(change(numbers), torch.float32) is None
    assert read_bias(change(numbers).to(torch.bfloat16), torch.bfloat16) is None


def test_a_layer_that_differs_from_its_own_code_is_refused_and_closed_again():
    # transformers' eager code adds Falcon's bias twice, by its mask and by itself
    model = build("falcon_alibi", torch.float32)
    model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedModel, match=r"layer 0 differs from its own code by .* another model"):
        LoadedModel.from_module(model)
    assert not installed_adapters(model)
    assert all("forward" not in part.__dict__ for part in model.transformer.modules())


def test_a_bias_that_is_no_slope_is_refused(monkeypatch):
    model = build("bloom", torch.float32)
    monkeypatch.setattr("transformers.models.bloom.modeling_bloom._get_alibi_slopes", lambda *_: torch.zeros(4))
    with pytest.raises(UnsupportedModel, match="not a slope times the distance"):
        LoadedModel.from_module(model)


def test_outside_a_scope_an_opened_model_is_as_transformers_wrote_it():
    untouched, model = build("mpt", torch.float32), build("mpt", torch.float32)
    LoadedModel.from_module(model)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(model(input_ids=ids).logits, untouched(input_ids=ids).logits)
    assert len(installed_adapters(LoadedModel.from_module(model).module)) == 2, "loading again changes nothing"


@pytest.mark.parametrize("family", ["falcon_alibi_twelve", "bloom_twelve"])
def test_far_chunks_get_the_bias_that_the_model_gives_them(family):
    # beyond 256, bfloat16 rounds the positions too
    chunk = Segment(SegmentKind.CHUNK, tuple(range(20, 90)), position_offset=700)
    prompt = Prompt((Segment(SegmentKind.SYSTEM, tuple(range(3, 60))), chunk, Segment(SegmentKind.QUESTION, (7, 8, 9))))
    model, layout = loaded_family(family), dense(arrange(prompt, "absolute"))
    expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers])
    torch.testing.assert_close(dense_logits(model, layout), expected, atol=1e-10, rtol=0)


def test_keys_repeated_for_a_group_of_heads_are_kept_once():
    layers = loaded_family("falcon_groups").layers
    assert [(layer.num_query_heads, layer.num_kv_heads) for layer in layers] == [(4, 2), (4, 2)]
    layout = dense_layout(random_prompt())
    expected = eager_logits(loaded_family("falcon_groups").module, layout, [layer.mask for layer in layers])
    torch.testing.assert_close(dense_logits(loaded_family("falcon_groups"), layout), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("family", "num_rows"), [("gpt2", 600), ("opt", 602)])
def test_the_table_says_how_many_positions_there_are_whatever_the_configuration_says(family, num_rows):
    model = build(family, torch.float32, max_position_embeddings=600)
    assert num_rows in [part.num_embeddings for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    model.config.max_position_embeddings = 4096
    assert LoadedModel.from_module(model).max_positions == 600


def test_a_model_that_counts_tokens_instead_of_reading_positions_is_refused():
    model = build("gpt2", torch.float32)
    table = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda positions: table(torch.arange(positions.shape[1])[None])
    with pytest.raises(UnsupportedModel, match="counts the tokens of a forward"):
        LoadedModel.from_module(model)


def test_the_fast_backends_say_why_they_leave_a_bias_to_torch():
    cpu = torch.device("cpu")
    chosen = choose_backend(None, torch.float32, cpu, has_bias=True)
    assert chosen.name == "torch" and "ALiBi" in chosen.reason
    with pytest.raises(NativeUnavailable, match=r"ALiBi.*leave the choice open"):
        choose_backend("native", torch.float32, cpu, has_bias=True)
    assert loaded_family("bloom").has_bias and not loaded_family("falcon").has_bias


def test_a_backend_of_ones_own_that_takes_no_bias_is_refused_at_load():
    class Own:
        def attend(self, query, key, value, *, scaling, causal=False, mask=None, softcap=None):
            raise AssertionError("never asked")

    own, cpu = Own(), torch.device("cpu")
    assert choose_backend(own, torch.float32, cpu).backend is own
    with pytest.raises(InvalidConfig, match=r"Own takes no bias.*leave the choice"):
        choose_backend(own, torch.float32, cpu, has_bias=True)
