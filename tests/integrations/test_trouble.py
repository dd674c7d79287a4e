"""Why an engine of vLLM does not compose, and why a prompt is not repaired there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.operations import WorkerFacts, block_bytes
from kvmosaic.vllm.scheduler.trouble import (
    connectors_trouble,
    engine_trouble,
    reads_in_place,
    request_trouble,
    why_copied,
    why_not_repaired,
    with_default_repair,
)

READS = WorkerFacts(can_read_in_place=True)
ABLE = WorkerFacts(can_repair=True, can_shift=True, num_positions=40)


@pytest.mark.parametrize(
    ("composition", "facts", "reason"),
    [
        (Composition(4, (10, 6), "shared", repair=2), [ABLE], ""),
        (Composition(4, (10, 6), "sequential", repair=2, texts=(0, 3)), [ABLE], ""),
        (Composition(4, (10, 6), "shared", repair=2, texts=(3, 0)), [ABLE], ""),
        (Composition(4, (10, 6), "shared", repair=2, texts=(0, 3)), [ABLE], "a text between documents"),
        (Composition(4, (30, 30), "shared", repair=2), [ABLE], "takes 64 positions; the model's rotary table has 40"),
        (Composition(4, (10, 6), "shared", repair=2), [ABLE, WorkerFacts()], "on these workers"),
    ],
)
def test_the_reason_against_repair_names_what_is_in_the_way(
    composition: Composition, facts: list[WorkerFacts], reason: str
) -> None:
    found = why_not_repaired(composition, composition.layout(range(100)), facts)
    assert reason in found and bool(reason) == bool(found)


REQUEST = SimpleNamespace(
    sampling_params=SimpleNamespace(prompt_logprobs=None),
    skip_reading_prefix_cache=False,
    mm_features=(),
    prompt_token_ids=[1],
    prompt_embeds=None,
    resumable=False,
)


@pytest.mark.parametrize("leaves_repair_open", [True, False])
def test_documents_that_are_alike_are_not_composed_unless_a_repair_is_set(leaves_repair_open: bool) -> None:
    composition = Composition(2, (12, 12), leaves_repair_open=leaves_repair_open)
    layout = composition.layout([1, 2, *range(10, 22), *range(10, 21), 30, 3, 4])
    found = request_trouble(REQUEST, composition, layout, [ABLE], in_place=False)
    assert (found.code if found else "") == ("alike" if leaves_repair_open else "")


@pytest.mark.parametrize(("facts", "repair"), [(ABLE, 8), (WorkerFacts(), 0)])
def test_the_default_repair_is_what_workers_can_compute(facts: WorkerFacts, repair: int) -> None:
    composition = Composition(0, (30, 300), repair=8, leaves_repair_open=True)
    assert with_default_repair(composition, composition.layout(range(340)), [facts]).repair == repair


@pytest.mark.parametrize(("length", "code"), [(128, "short"), (129, "")])
def test_short_documents_are_not_composed_unless_a_repair_is_set(length: int, code: str) -> None:
    composition = Composition(0, (length, 128), companions=((1, 2),), leaves_repair_open=True)
    layout = composition.layout([*range(length), *range(300, 428), 7])
    found = request_trouble(REQUEST, composition, layout, [ABLE], in_place=False)
    assert (found.code if found else "") == code
    asked = replace(composition, leaves_repair_open=False)
    assert request_trouble(REQUEST, asked, layout, [ABLE], in_place=False) is None


OURS = SimpleNamespace(kv_connector="kvmosaic", kv_connector_extra_config={})


def beside(*names: str | dict[str, Any]) -> Any:
    """The engine's `kv_transfer_config` with these connectors."""
    children = [name if isinstance(name, dict) else {"kv_connector": name} for name in names]
    return SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children})


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (OURS, ""),
        (beside("kvmosaic"), ""),
        (beside("kvmosaic", "OffloadingConnector"), ""),
        (beside("kvmosaic", "SimpleCPUOffloadConnector", "OffloadingConnector"), ""),
        (beside("OffloadingConnector", "kvmosaic"), "list kvmosaic first"),
        (beside("kvmosaic", "OffloadingConnector", "LMCacheConnectorV1"), "LMCacheConnectorV1 does not name"),
        (beside("kvmosaic", "kvmosaic"), "kvmosaic does not name"),
        (beside("kvmosaic", "MultiConnector"), "MultiConnector does not name"),
        (
            beside("kvmosaic", {"kv_connector": "OffloadingConnector", "kv_connector_module_path": "mine"}),
            "OffloadingConnector does not name",
        ),
        (SimpleNamespace(kv_connector="Wrapping", kv_connector_extra_config={}), "Wrapping is the first connector"),
    ],
)
def test_only_connectors_that_name_blocks_by_their_hashes_are_beside_ours(engine: Any, reason: str) -> None:
    found = connectors_trouble(engine, OURS)
    assert (found.reason if found else "").count(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize("part", ["model_config", "aux_output_config"])
def test_returned_experts_are_a_reason_to_compose_nothing(part: str) -> None:
    cache = SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto")
    spec = type("FullAttentionSpec", (), {})()
    group = SimpleNamespace(kv_cache_spec=spec)
    options = {"model_config": SimpleNamespace(), part: SimpleNamespace(enable_return_routed_experts=True)}
    config = SimpleNamespace(cache_config=cache, parallel_config=SimpleNamespace(), **options)
    found = engine_trouble(config, SimpleNamespace(kv_cache_groups=[group]))
    assert found is not None and found.code == "routed_experts"


def test_layers_of_several_sizes_in_one_group_are_judged_by_what_each_of_them_keeps() -> None:
    def spec(kind: str, **fields: Any) -> Any:
        return type(kind, (), fields)()

    cache = SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto")
    model = SimpleNamespace(is_encoder_decoder=False)
    config = SimpleNamespace(
        cache_config=cache, parallel_config=SimpleNamespace(), model_config=model, speculative_config=None
    )
    full, latent = spec("FullAttentionSpec", sliding_window=9), spec("MLAAttentionSpec")
    for specs, code in [
        ([full, full], ""),
        ([latent, latent], ""),
        ([full, spec("MambaSpec")], "cache_kind"),
        ([spec("SlidingWindowSpec", sliding_window=9)] * 2, "cache_kind"),
    ]:
        named = {f"layer {number}": each for number, each in enumerate(specs)}
        of_all = spec("UniformTypeKVCacheSpecs", kv_cache_specs=named, page_size_bytes=700, block_size=16)
        group = SimpleNamespace(kv_cache_spec=of_all, layer_names=list(named))
        found = engine_trouble(config, SimpleNamespace(kv_cache_groups=[group]))
        assert (found.code if found else "") == code
        assert block_bytes(group) == 700
    alike = SimpleNamespace(kv_cache_spec=spec("FullAttentionSpec", page_size_bytes=100), layer_names=["a", "b"])
    assert block_bytes(alike) == 200


@pytest.mark.parametrize("name", ["auto", "bfloat16", "fp8", "fp8_e5m2", "fp8_per_token_head", "nvfp4", "int8"])
def test_a_cache_in_another_format_is_a_reason_to_compose_nothing(name: str) -> None:
    cache = SimpleNamespace(enable_prefix_caching=True, cache_dtype=name)
    group = SimpleNamespace(kv_cache_spec=type("FullAttentionSpec", (), {})())
    model = SimpleNamespace(is_encoder_decoder=False)
    config = SimpleNamespace(
        cache_config=cache, parallel_config=SimpleNamespace(), model_config=model, speculative_config=None
    )
    found = engine_trouble(config, SimpleNamespace(kv_cache_groups=[group]))
    if name in ("auto", "bfloat16", "fp8", "fp8_e5m2"):
        assert found is None
    else:
        assert found is not None and found.code == "cache_dtype" and f"kept as {name}" in found.reason


@pytest.mark.parametrize(
    ("facts", "options", "reason"),
    [
        ([WorkerFacts()], {}, ""),
        ([READS, WorkerFacts(no_reading="its graphs are full")], {}, "its graphs are full"),
        ([READS], {"is_alone": False}, "another connector"),
        ([READS], {"penalty": 1.2}, "leave it at 1"),
        ([READS], {"strategy": "shared"}, "repair in shared positions"),
    ],
)
def test_a_copied_request_has_a_reason_where_reading_was_chosen(
    facts: list[WorkerFacts], options: dict[str, Any], reason: str
) -> None:
    composition = Composition(4, (10, 6), options.get("strategy", "sequential"), repair=2)
    request = SimpleNamespace(sampling_params=SimpleNamespace(repetition_penalty=options.get("penalty", 1.0)))
    is_alone = options.get("is_alone", True)
    said = why_copied(request, composition, facts, is_alone=is_alone)
    assert reason in said and bool(said) == bool(reason)
    assert not reads_in_place(request, composition, composition.layout(range(25)), facts, is_alone=is_alone)
