"""Every architecture: what detection finds, and the dense twin against transformers' own eager attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import FAMILIES, build, each_family
from support.loaded import dense_layout, dense_logits, loaded_family, random_prompt
from support.reference import eager_logits

from kvmosaic.attention.dense import DenseAttention
from kvmosaic.errors import WAY_OUT, NotMovable, UnsupportedModel
from kvmosaic.layers import AttentionCall
from kvmosaic.model import LoadedModel
from kvmosaic.rope import Rotation, rotate

SUPPORTED = [name for name, about in FAMILIES.items() if not about.is_refused]
MOVABLE = [name for name in SUPPORTED if FAMILIES[name].is_movable]
FIXED = [name for name in SUPPORTED if not FAMILIES[name].is_movable]
REFUSED = [name for name, about in FAMILIES.items() if about.is_refused]


def _written(rotation: Rotation | None) -> str:
    if rotation is None:
        return "none"
    sign = "-" if rotation.sign < 0 else ""
    return f"{sign}{rotation.layout} {rotation.offset}+{rotation.rotary_dim}/{rotation.head_dim}"


def _repeated(pattern: tuple[str, ...], num_layers: int) -> list[str]:
    return [pattern[index % len(pattern)] for index in range(num_layers)]


def test_enough_architectures_can_be_moved() -> None:
    assert len({FAMILIES[name].model_type for name in MOVABLE}) >= 57


@pytest.mark.parametrize("family", each_family(SUPPORTED))
def test_detection_finds_every_rotation_and_mask(family: str) -> None:
    model, about = loaded_family(family), FAMILIES[family]
    assert [_written(layer.rotation) for layer in model.layers] == _repeated(about.rotations, len(model.layers))
    assert [str(layer.mask) for layer in model.layers] == _repeated(about.masks, len(model.layers))
    assert [layer.index for layer in model.layers] == list(range(len(model.layers)))
    assert model.is_movable == about.is_movable
    assert about.reason in model.immovable_reason
    assert bool(model.immovable_reason) == (not model.is_movable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", each_family(SUPPORTED))
def test_detection_finds_the_same_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    coarse, fine = LoadedModel.from_module(build(family, dtype)), loaded_family(family)
    for mine, theirs in zip(coarse.layers, fine.layers, strict=True):
        assert _written(mine.rotation) == _written(theirs.rotation)
        assert (mine.mask, mine.source_layer, mine.value_in_key) == (
            theirs.mask,
            theirs.source_layer,
            theirs.value_in_key,
        )
        assert (mine.bias is None) == (theirs.bias is None)
        # a model built in bfloat16 makes its table of sines from frequencies in bfloat16
        is_table = dtype is torch.bfloat16 and family in ("gptj", "codegen")
        if mine.rotation and theirs.rotation and not is_table:
            assert mine.rotation.inv_freq == pytest.approx(theirs.rotation.inv_freq, rel=1e-6)


@pytest.mark.parametrize("family", each_family(SUPPORTED))
def test_the_dense_twin_equals_eager_attention(family: str) -> None:
    model, layout = loaded_family(family), dense_layout(random_prompt())
    expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers if not layer.num_chosen])
    assert torch.isfinite(expected).all()
    assert (dense_logits(model, layout) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("family", each_family(SUPPORTED))
def test_the_dense_twin_equals_eager_attention_in_float32(family: str) -> None:
    model, layout = LoadedModel.from_module(build(family, torch.float32)), dense_layout(random_prompt())
    expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers if not layer.num_chosen])
    assert (dense_logits(model, layout) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", each_family(name for name in MOVABLE if name != "beam"))
def test_moved_chunks_equal_eager_attention_at_their_new_positions(family: str) -> None:
    # Chunks that saw nothing and are moved behind each other: one dense forward at the new positions means the same.
    # Not so where a token feels its absolute position: Beam's queries (see below), and the ends of Llama 4's chunks of
    # positions, which are put out of reach here.
    changes = {"attention_chunk_size": 64} if family == "llama4" else {}
    model = LoadedModel.from_module(build(family, **changes)) if changes else loaded_family(family)
    layout = dense_layout(random_prompt(system=0), "sequential")
    assert layout.is_one_forward and layout.distances.any()
    expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers if not layer.num_chosen])
    assert (dense_logits(model, layout) - expected).abs().max() <= 1e-10


def test_queries_scaled_by_their_position_keep_the_scale_of_where_they_were_computed() -> None:
    model, layout = loaded_family("beam"), dense_layout(random_prompt(system=0), "sequential")
    expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers if not layer.num_chosen])
    difference = (dense_logits(model, layout) - expected).abs()
    assert difference[:9].max() <= 1e-10, "the first chunk is not moved"
    assert 1e-6 < difference.max() < 1e-2


@pytest.mark.parametrize("family", each_family(MOVABLE))
def test_keys_depend_on_the_position_only_through_the_rotation(family: str) -> None:
    model, tokens = loaded_family(family), torch.arange(3, 14)
    layout = dense_layout(random_prompt(system=0, chunks=(), question=11))
    keys: dict[int, dict[int, torch.Tensor]] = {}
    for start in (0, 160):
        twin = DenseAttention(replace(layout, positions=layout.positions + start), model.layers)

        def record(call: AttentionCall, start: int = start, twin: DenseAttention = twin) -> torch.Tensor:
            keys.setdefault(start, {})[call.layer_index] = call.key
            return twin(call)

        model.forward(tokens, torch.arange(11) + start, torch.tensor([10]), record)
    for layer in model.layers:
        near, far = keys[0][layer.index], keys[160][layer.index]
        moved = rotate(near, layer.rotation.tables(torch.tensor([160]), dtype=near.dtype)) if layer.rotation else near
        assert (moved - far).abs().max() <= 1e-10 * max(1.0, float(far.abs().max()))


@pytest.mark.parametrize("family", FIXED)
def test_keys_of_a_fixed_model_are_never_moved(family: str) -> None:
    model, layout = loaded_family(family), dense_layout(random_prompt(), "sequential")
    with pytest.raises(NotMovable, match=r"moved by .*, but its"):
        dense_logits(model, layout)


@pytest.mark.parametrize("family", REFUSED)
def test_other_models_are_refused_with_a_reason(family: str) -> None:
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=FAMILIES[family].reason) as refusal:
        LoadedModel.from_module(model)
    assert model.config._attn_implementation == before
    message = str(refusal.value)
    assert message.endswith(WAY_OUT)
    assert any(type(part).__name__ in message for part in model.modules())


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_name_their_source(family: str) -> None:
    model = loaded_family(family)
    assert [layer.source_layer for layer in model.layers] == [0, 1, 0, 1]
    assert [layer.is_stored for layer in model.layers] == [True, True, False, False]
    assert model.layers[2].bytes_per_token(torch.float32) == 0
