"""The check at start: it passes on what is understood, and finds every way to misunderstand a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.vllm import faults
from support.vllm.faults import places_of
from support.vllm.mistakes import FAULTS, IN_CACHE, MISTAKES, ROTATED, STORED

from kvmosaic.vllm.worker.kv_layout import KVLayout
from kvmosaic.vllm.worker.self_check import check, check_rotations

LENGTH = {"max_model_len": 4096}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {"dtype": "float32", **LENGTH}),
    "bfloat16": ("llama", {"dtype": "bfloat16", **LENGTH}),
    "float16": ("llama", {"dtype": "float16", **LENGTH}),
    "normed": ("qwen3", {"dtype": "bfloat16", **LENGTH}),
    "latent": ("deepseek", {"dtype": "bfloat16", "environment": {}, **LENGTH}),
    "deep": ("deep", {"dtype": "bfloat16", **LENGTH}),
}
KINDS = ("float32", "bfloat16", "float16", "deep")
LAYERS = (0, 1, -1)
ROTATION, CACHE = "rotation was not understood", "cache was not understood"


@pytest.fixture(params=ENGINES)
def engine(request, vllm_engine):
    name, options = ENGINES[request.param]
    return vllm_engine(name, **options)


@pytest.fixture(params=KINDS)
def llama(request, vllm_engine):
    name, options = ENGINES[request.param]
    return vllm_engine(name, **options)


def left(places: KVLayout) -> float:
    """The largest number in the blocks that a check uses."""
    slots = torch.arange(min(places.num_blocks, 100) * places.block_size)
    parts = [part for place in places.layers for part in place.layout.read(slots) if part is not None]
    return max(float(part.abs().max()) for part in parts)


def passed(engine: Any) -> list[Any]:
    """What the check says, at the start of vLLM and now, and the largest number that it leaves."""
    places, nested = places_of(engine)
    return [check(places, nested), check_rotations(places, nested.max_length), left(places)]


def mistaken(engine: Any, mistake: str) -> list[list[Any]]:
    """What the check says of a mistake in each of some layers, and in all of them: the layer's name first."""
    places, nested = places_of(engine)
    said = []
    for layer in (*LAYERS, None):
        wrong = range(len(places.layers)) if layer is None else [layer % len(places.layers)]
        layers = [MISTAKES[mistake](place) if i in wrong else place for i, place in enumerate(places.layers)]
        said.append(
            [places.layers[layer or 0].name, check(replace(places, layers=tuple(layers)), nested), left(places)]
        )
    return said


def planted(engine: Any, fault: str) -> list[list[str]]:
    """What the check says of a fault in each of some layers: the layer's name first; at last without one."""
    places, nested = places_of(engine)
    said = []
    for layer in LAYERS:
        with FAULTS[fault](places, layer):
            said.append([places.layers[layer].name, check(places, nested)])
    return [*said, ["", check(places, nested)]]


def test_it_passes_and_leaves_nothing(engine):
    assert engine.call(passed) == ["", "", 0.0]
    assert not engine.call("trouble") or "prefix caching is off" in engine.call("trouble")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_in_every_layer(engine, mistake, request):
    if mistake == "values for keys" and "latent" in request.node.callspec.id:
        pytest.skip("a latent cache has no values")
    for name, said, number in engine.call(mistaken, mistake=mistake):
        assert said.startswith(f"{name}:"), said
        assert (CACHE if mistake in IN_CACHE else ROTATION) in said
        assert number == 0.0


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_single_layer_are_found(llama, fault):
    *found, without = llama.call(planted, fault=fault)
    for name, said in found:
        assert said.startswith(f"{name}:"), said
        assert fault not in ROTATED or ROTATION in said
        assert fault not in STORED or CACHE in said
    assert without == ["", ""]


def mixed(engine: Any) -> list[str]:
    """What the check says where every layer is given something of tokens that it does not see."""
    places, nested = places_of(engine)
    with faults.mixed_embeddings(places, 0):
        said = check(places, nested)
    return [said, check(places, nested)]


def test_input_from_other_tokens_is_found_before_the_first_layer(llama):
    said, without = llama.call(mixed)
    assert "the first layer is given something else" in said
    assert without == ""


def constant(engine: Any) -> str:
    """The check of a layer whose keys do not turn, taken for one that does."""
    places, nested = places_of(engine)
    with faults.rotation(places, 1, lambda positions, query, key, original: (query, key)):
        unturned = replace(places.layers[1], rotation=None)
        fine = check(replace(places, layers=(places.layers[0], unturned, places.layers[2])), nested)
        return fine or check(places, nested)


def test_a_layer_without_positions_is_checked_as_one(vllm_engine):
    said = vllm_engine("llama", **ENGINES["float32"][1]).call(constant)
    assert ROTATION in said and "layers.1." in said


def directly(engine: Any) -> list[str]:
    """The check of rotary embeddings alone, of mistakes in how keys turn."""
    places, nested = places_of(engine)
    said = []
    for mistake in ("backwards", "larger", "slower", "other pairs", "only partly"):
        layers = [MISTAKES[mistake](place) if i == 2 else place for i, place in enumerate(places.layers)]
        said.append(check_rotations(replace(places, layers=tuple(layers)), nested.max_length))
    return said


def test_rotary_embeddings_are_tried_where_no_forward_can_run(engine):
    for said in engine.call(directly):
        assert ROTATION in said and "layers.2." in said
