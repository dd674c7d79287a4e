"""The check at start where vLLM's model must not be called as a whole: attention modules alone, or caches alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from support.vllm.faults import places_of
from support.vllm.mistakes import FAULTS, IN_CACHE, MISTAKES, ROTATED, STORED

from kvmosaic.vllm.worker.extra_forward import Scope, can_run, make_forward, scope_at_start
from kvmosaic.vllm.worker.kv_layout import KVLayout
from kvmosaic.vllm.worker.self_check import check, check_at_start, check_attention, check_caches

LENGTH = {"max_model_len": 4096}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {"dtype": "float32", **LENGTH}),
    "bfloat16": ("deep", {"dtype": "bfloat16", **LENGTH}),
    "normed": ("qwen3", {"dtype": "float16", **LENGTH}),
    "latent": ("deepseek", {"dtype": "bfloat16", "environment": {}, **LENGTH}),
}
FORWARDLESS: dict[str, dict[str, Any]] = {
    "LoRA": {"enable_lora": True, "max_loras": 2},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
}
ROTATION, CACHE = "rotation was not understood", "cache was not understood"


@pytest.fixture(params=ENGINES)
def engine(request, vllm_engine):
    name, options = ENGINES[request.param]
    return vllm_engine(name, **options)


def left(places: KVLayout) -> float:
    """The largest number in the blocks that a check uses."""
    slots = places.slots(range(min(places.num_blocks, 100)), 0, min(places.num_blocks, 100) * places.block_size)
    parts = [part for place in places.layers for part in place.layout.read(slots) if part is not None]
    return max(float(part.abs().max()) for part in parts)


def passed(engine: Any) -> list[Any]:
    """What the checks say of a model as it is, and the largest number that they leave."""
    places, nested = places_of(engine)
    return [check_attention(places, nested), check_caches(places, nested.max_length), left(places)]


def test_correct_models_pass_and_nothing_is_left(engine):
    assert engine.call(passed) == ["", "", 0.0]


def mistaken(engine: Any, part: str) -> list[list[Any]]:
    """What a check says of every mistake in a layer: the mistake, the layer's name, the answer, the largest number."""
    places, nested = places_of(engine)
    checks: dict[str, Callable[[KVLayout], str]] = {
        "attention": partial(check_attention, nested=nested),
        "caches": partial(check_caches, max_length=nested.max_length),
    }
    said = []
    unknown = {"taken for unturned"} if part == "caches" else set()  # only a module that is called tells
    unknown |= {"values for keys"} if places.layers[1].layout.is_latent else set()
    for mistake, change in MISTAKES.items():
        if mistake in unknown:
            continue
        layers = tuple(change(place) if i == 1 else place for i, place in enumerate(places.layers))
        found = checks[part](replace(places, layers=layers))
        said.append([mistake, places.layers[1].name, found, left(places)])
    return said


@pytest.mark.parametrize("part", ["attention", "caches"])
def test_mistakes_are_found_without_the_model(engine, part):
    for mistake, name, said, number in engine.call(mistaken, part=part):
        assert said.startswith(f"{name}:"), (mistake, said)
        assert part == "caches" or (CACHE if mistake in IN_CACHE else ROTATION) in said, (mistake, said)
        assert number == 0.0


def planted(engine: Any) -> list[list[str]]:
    """What the check of attention alone says of every fault in a layer: the fault, the layer's name, the answer."""
    places, nested = places_of(engine)
    said = []
    for fault, plant in FAULTS.items():
        for layer in (0, -1):
            with plant(places, layer):
                said.append([fault, places.layers[layer].name, check_attention(places, nested)])
    return said


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_faults_of_a_single_layer_are_found_by_its_attention_alone(vllm_engine, kind):
    name, options = ENGINES[kind]
    for fault, layer, said in vllm_engine(name, **options).call(planted):
        assert said.startswith(f"{layer}:"), (fault, said)
        assert fault not in ROTATED or ROTATION in said
        assert fault not in STORED or CACHE in said


def at_start(engine: Any) -> list[Any]:
    """What was tested when vLLM started, and what the check says then of a fault in the last layer."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    composing = get_kv_transfer_group()._worker
    places, nested = places_of(engine)
    forms = composing.configuration
    said = []
    for fault in ("other_frequency", "window", "stored_elsewhere"):
        with FAULTS[fault](places, -1):
            said.append(check(places, nested))
    trouble = composing.facts.trouble
    return [
        trouble,
        composing.start_check.tested,
        can_run(*forms),
        scope_at_start(*forms).name,
        places.layers[-1].name,
        said,
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "LoRA",
        pytest.param(
            "ngram", marks=pytest.mark.skipif(not find_spec("numba"), reason="vLLM's n-gram proposer needs numba")
        ),
    ],
)
def test_the_whole_model_is_checked_before_the_first_request_though_no_repair_can_run(vllm_engine, kind):
    engine = vllm_engine("llama", **FORWARDLESS[kind])
    trouble, tested, no_repair, scope, name, said = engine.call(at_start)
    assert trouble == "" and no_repair and scope == "MODEL"
    assert tested == "every layer, and the model as a whole"
    assert all(found.startswith(f"{name}:") for found in said), said
    assert engine.call("trouble") == ""


def refused(engine: Any) -> list[Any]:
    """What is tested where an attention module cannot be called, and where there is no forward."""
    places, nested = places_of(engine)
    holder = next(each for each in places.root.modules() if each is not places.root and hasattr(each, "rotary_emb"))
    holder.forward = lambda *rows: rows
    try:
        without_module = check_at_start(places, nested, Scope.ATTENTION, nested.max_length)
    finally:
        del holder.forward
    without_forward = check_at_start(places, "no builder", Scope.MODEL, nested.max_length)
    whole = check_at_start(places, nested, Scope.ATTENTION, nested.max_length)
    return [[each.tested, each.trouble] for each in (without_module, without_forward, whole)]


def test_what_cannot_be_called_leaves_the_caches_to_test(vllm_engine):
    said = vllm_engine("llama", **ENGINES["float32"][1]).call(refused)
    assert said == [["caches and rotary embeddings", ""]] * 2 + [["the attention of every layer", ""]]


def of_stages(engine: Any) -> list[list[Any]]:
    return [list(said) for said in engine.llm.collective_rpc(of_stage)]


def of_stage(worker: Any) -> tuple[Any, ...]:
    """What one stage tested when it started, and what it says of a fault in its last layer."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    composing = get_kv_transfer_group()._worker
    places, forward = composing.places, make_forward(*composing.configuration, composing.places.root)
    with FAULTS["other_frequency"](places, -1):
        found = check_at_start(places, forward, Scope.ATTENTION, 1024)
    return composing.start_check.tested, composing.facts.trouble, places.layers[-1].name, found.trouble


def test_every_stage_of_a_pipeline_tests_the_attention_of_its_layers(vllm_engine):
    environment = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    engine = vllm_engine("deep", pipeline_parallel_size=2, distributed_executor_backend="mp", environment=environment)
    stages = engine.call(of_stages)
    assert len({name for _, _, name, _ in stages}) == 2
    for tested, trouble, name, found in stages:
        assert (tested, trouble) == ("the attention of every layer", "")
        assert found.startswith(f"{name}:") and ROTATION in found
    assert engine.call("trouble") == ""


def as_replica(engine: Any) -> str:
    """What the check of attention alone says where other replicas, which do not run, share the experts."""
    places, nested = places_of(engine)
    parallel = engine.engine.vllm_config.parallel_config
    before = parallel.data_parallel_size, parallel.is_moe_model
    parallel.data_parallel_size, parallel.is_moe_model = 2, True
    try:
        return check_attention(places, nested)
    finally:
        parallel.data_parallel_size, parallel.is_moe_model = before


def test_a_replica_does_not_wait_for_the_others(vllm_engine):
    assert vllm_engine("llama", **ENGINES["float32"][1]).call(as_replica) == ""
