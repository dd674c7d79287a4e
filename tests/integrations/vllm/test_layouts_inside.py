"""Keys and values that vLLM wrote, read where they lie and moved to where vLLM would have computed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.vllm.asking import documents

from kvmosaic.vllm.operations import Move
from kvmosaic.vllm.worker.kv_layout import KVLayout, Mover

CHUNK, SHORT, LONG = 150, 37, 301
DTYPES = {"float32": 1e-6, "bfloat16": 2**-5}
"""In bfloat16 a key below 8 is rounded by up to 2⁻⁶ twice: by vLLM, and once more when it was turned."""


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"layout": "CpuVectorLayout", "turned": [0, 32], "root": "LlamaForCausalLM"}),
    "qwen3": ("qwen3", {}, {"layout": "CpuVectorLayout", "turned": [0, 32], "root": "Qwen3ForCausalLM"}),
    "keys joined": ("deepseek", {}, {"layout": "CpuVectorLayout", "turned": [32, 64], "root": "DeepseekV2ForCausalLM"}),
    "latent": (
        "deepseek",
        {"environment": {"VLLM_MLA_DISABLE": "0"}},
        {"layout": "LatentLayout", "turned": [512, 64], "root": "DeepseekV2ForCausalLM"},
    ),
}
"""Model, options of the engine, and what is found of its layers."""


def places_of(engine: Any) -> KVLayout:
    worker = engine.core.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context
    caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    return KVLayout.of(worker.vllm_config, caches)


def written(engine: Any, token_ids: list[int]) -> list[Any]:
    """Answers a prompt; keys and values of its tokens in every layer."""
    from vllm import SamplingParams

    places, manager, blocks = places_of(engine), engine.scheduler.kv_cache_manager, []
    allocate = manager.allocate_slots

    def noted(request: Any, *arguments: Any, **named: Any) -> Any:
        given = allocate(request, *arguments, **named)
        blocks[:] = manager.get_block_ids(request.request_id)[0]
        return given

    manager.allocate_slots = noted
    try:
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        engine.llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    finally:
        manager.allocate_slots = allocate
    slots = places.slots(blocks, 0, len(token_ids))
    return [place.layout.read(slots) for place in places.layers]


def look(engine: Any) -> dict[str, Any]:
    """What was found of the model's layers."""
    places = places_of(engine)
    return {
        "root": type(places.root).__name__,
        "layouts": [type(place.layout).__name__ for place in places.layers],
        "turned": [place.rotation and [place.rotation.first, place.rotation.rotary_dim] for place in places.layers],
        "interleaved": [place.rotation and place.rotation.layout == "interleaved" for place in places.layers],
        "shared": len({place.rotation for place in places.layers}),
    }


def moved(engine: Any, before: int, after: int) -> dict[str, Any]:
    """A chunk computed behind `before` tokens is moved to where it was computed behind `after` tokens.

    Largest differences of keys of layer 0, with and without the move, and whether the values of layer 0 are the same.
    """
    places = places_of(engine)
    chunk, *texts = documents(3, CHUNK, before, after)
    here, there = (written(engine, [*text, *chunk]) for text in texts)
    wanted_keys, wanted_values = (part if part is None else part[after:] for part in there[0])

    num_blocks = -(-(LONG + CHUNK) // places.block_size) + 1
    free = range(places.num_blocks - 2 * num_blocks, places.num_blocks)
    source, target = tuple(free[:num_blocks]), tuple(free[num_blocks:])
    for place, (keys, values) in zip(places.layers, here, strict=True):
        place.layout.write(places.slots(source, 0, before + CHUNK), keys, values)
    Mover(places, part_tokens=64).move([Move(source, before, target, 5, CHUNK, before, after - before)])

    keys, values = places.layers[0].layout.read(places.slots(target, 5, CHUNK))
    unturned = keys if places.layers[0].rotation is None else here[0][0][before:]
    return {
        "difference": (keys.double() - wanted_keys.double()).abs().max().item(),
        "without": (unturned.double() - wanted_keys.double()).abs().max().item(),
        "same_values": wanted_values is None or torch.equal(values, wanted_values),
        "same_latent": torch.equal(keys[..., :-64], wanted_keys[..., :-64]) if wanted_values is None else True,
    }


def knows(engine: Any, instructions: str) -> bool:
    """Whether vLLM's kernels for this machine can pack for these instructions, which it need not have to do so."""
    from vllm import _custom_ops as operations

    rows = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    cache = torch.zeros(1, 1, 32, 32, dtype=torch.bfloat16)
    try:
        operations.cpu_attn_reshape_and_cache(rows, rows, cache, cache.clone(), torch.zeros(1).long(), instructions)
    except RuntimeError as error:
        assert "Unsupported CPU attention configuration" in str(error)
        return False
    return True


def kernel_order(engine: Any, instructions: str, dtype: str) -> list[str]:
    """The layout that is found when the kernel packs for these instructions, and keys and values read from it."""
    from kvmosaic.vllm.worker.layouts import find_layout

    place = places_of(engine).layers[0]
    number_type = getattr(torch, dtype)
    cache = torch.zeros(4, *place.layer.kv_cache.shape[1:], dtype=number_type)
    usual = place.layer.isa
    place.layer.isa = instructions
    try:
        layout = find_layout("layer", place.layer, cache)
        slots = torch.randperm(layout.num_slots)
        keys, values = (torch.randn(len(slots), place.layer.num_kv_heads, layout.key_size) for _ in range(2))
        layout.write(slots, keys.to(number_type), values.to(number_type))
        read = layout.read(slots[:50])
    finally:
        place.layer.isa = usual
    assert torch.equal(read[0], keys[:50].to(number_type))
    assert read[1] is not None and torch.equal(read[1], values[:50].to(number_type))
    return [type(layout).__name__]


@pytest.mark.parametrize("case", CASES)
def test_layers_and_their_rotation_are_found(vllm_engine, case):
    name, options, wanted = CASES[case]
    found = vllm_engine(name, plugin=False, **options).call(look)
    assert found["layouts"] == [wanted["layout"]] * 3
    assert found["turned"] == [wanted["turned"]] * 3
    assert found["interleaved"] == [name == "deepseek"] * 3
    assert found["shared"] == 1
    assert found["root"] == wanted["root"]


@pytest.mark.parametrize("before, after", [(SHORT, LONG), (LONG, SHORT)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_moved_keys_of_the_first_layer_are_those_that_vllm_computes_there(vllm_engine, case, dtype, before, after):
    name, options, _ = CASES[case]
    given = options if dtype == "float32" else {**options, "dtype": dtype}
    found = vllm_engine(name, plugin=False, **given).call(moved, before=before, after=after)
    assert found["difference"] <= DTYPES[dtype]
    assert found["same_values"] and found["same_latent"]
    assert found["without"] > 1, "or there was nothing to turn"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("instructions, layout", [("vec", "CpuVectorLayout"), ("vec16", "CpuVectorLayout")])
def test_orders_of_the_cpu_kernel_are_found_out(vllm_engine, instructions, layout, dtype):
    engine = vllm_engine("llama", plugin=False)
    assert engine.call(kernel_order, instructions=instructions, dtype=dtype) == [layout]


def test_the_order_for_matrix_tiles_is_found_out_too(vllm_engine):
    engine = vllm_engine("llama", plugin=False)
    if not engine.call(knows, instructions="amx"):
        pytest.skip("vLLM's kernels for this CPU have none for AMX; test_layouts.py has tiles of another order")
    assert engine.call(kernel_order, instructions="amx", dtype="bfloat16") == ["CpuTiledLayout"]
