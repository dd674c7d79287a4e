"""Plans in numbers that can be worked out by hand."""

from __future__ import annotations

import json
import sys
from subprocess import run

import pytest

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.capacity import Demand, ModelFacts, plan_capacity
from kvmosaic.lab.capacity.plan import codec_share, parse_headroom
from kvmosaic.layers import LayerShape
from kvmosaic.layout import arrange

GIB = 2**30
LAYERS = tuple(LayerShape(index, 2, 64, 64, index=index, num_query_heads=8) for index in range(4))
MODEL = ModelFacts("small", "bfloat16", 2, 10**8, 2 * 10**8, 32_768, LAYERS)
"""4 layers of 2 key heads of 64: 2,048 bytes per token, 32 KiB per block."""
DEMAND = Demand(10_000, 1_000, 8, 4, system_tokens=100, question_tokens=30, answer_tokens=50)


def test_import_needs_no_torch() -> None:
    code = "import sys, kvmosaic.lab.capacity; print({'torch', 'transformers'} & set(sys.modules))"
    assert run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout == "set()\n"


def test_memory_is_divided_without_a_rest() -> None:
    room = plan_capacity(MODEL, GIB, DEMAND, headroom="100MiB").room
    assert room.bytes_per_block == 16 * 2_048
    # 7 blocks of system text, once; 5 blocks of question and answer for each of 8 prompts
    assert room.request_blocks == 7 + 8 * 5
    left = GIB - 2 * 10**8 - 100 * 2**20 - room.request_bytes
    assert room.chunk_blocks == left // room.bytes_per_block
    assert room.blocks_per_document == 63 and room.resident == room.chunk_blocks // 63
    assert room.wasted_share(1_000) == pytest.approx(8 / 1_008)


def test_planned_documents_fit_into_the_engines_own_pools() -> None:
    from kvmosaic.cache import KVCache
    from kvmosaic.config import ChunkCacheConfig
    from kvmosaic.prompt import Prompt

    demand = Demand(100, 50, 2, 3, system_tokens=20, question_tokens=10, answer_tokens=15)
    room = plan_capacity(MODEL, 202 * 10**6, demand, headroom=0).room
    assert 3 <= room.resident < 100
    kv_cache = KVCache(
        "model",
        ChunkCacheConfig(),
        request_blocks=room.request_blocks,
        chunk_blocks=room.chunk_blocks,
        bytes_per_block=room.bytes_per_block,
    )
    held = []
    for number in range(demand.concurrency):
        documents = [[number * 3 + index] * 50 for index in range(3)]
        layout = arrange(Prompt.from_tokens([1] * 20, documents, [100 + number] * 10), "shared", "system")
        allocation = kv_cache.allocate(kv_cache.plan(layout))
        kv_cache.begin_step()
        for span in allocation.spans:
            if span.chunk is None or span.is_owner:
                kv_cache.advance(allocation, span.index, span.num_tokens - span.num_computed)
        kv_cache.end_step()
        kv_cache.append_slots(allocation, range(15))
        held.append(allocation)
    assert kv_cache.request_pool.num_used == room.request_blocks
    for allocation in held:
        kv_cache.release(allocation)
    for number in range(demand.documents):
        layout = arrange(Prompt.from_tokens([1] * 20, [[200 + number] * 50], [1]), "shared", "system")
        allocation = kv_cache.allocate(kv_cache.plan(layout))
        kv_cache.begin_step()
        for span in allocation.spans:
            if span.chunk is None or span.is_owner:
                kv_cache.advance(allocation, span.index, span.num_tokens - span.num_computed)
        kv_cache.end_step()
        kv_cache.release(allocation)
    assert len(kv_cache.chunks()) == room.resident


def test_what_does_not_fit_names_the_parts_and_the_way_out() -> None:
    with pytest.raises(InvalidConfig, match=r"small does not fit into 0\.\d+ GiB: weights .*; take a larger device"):
        plan_capacity(MODEL, "150MiB", DEMAND)
    with pytest.raises(InvalidConfig, match="small does not fit into 80 bytes: "):  # of somebody who left out the unit
        plan_capacity(MODEL, "80", DEMAND)
    with pytest.raises(InvalidConfig, match=r"left for documents, and one of 1,000 tokens takes .*; take a larger"):
        plan_capacity(MODEL, 2 * 10**8 + 47 * 32_768, DEMAND, headroom=0)


def test_codecs_take_the_share_that_they_write() -> None:
    import torch

    from kvmosaic.entries.codec import CODECS

    for name in ("none", "int8"):
        parts = CODECS[name].parts((64, 2, 64), torch.bfloat16, "tokens")
        assert codec_share(name, 2) == sum(part.num_bytes for part in parts) / (2 * 64 * 2 * 64)


def test_planned_tiers_say_how_many_documents_fit() -> None:
    plan = plan_capacity(MODEL, GIB, DEMAND, tiers=["host:1GiB", "redis://localhost"])
    assert [tier.kind for tier in plan.tiers] == ["host", "redis"]
    assert plan.tiers[0].kept == GIB // (1_000 * 2_048) and plan.tiers[1].kept is None


def test_what_fits_is_all_resident_and_json_has_no_infinity() -> None:
    plan = plan_capacity(MODEL, "8GiB", Demand(100, 1_000, documents_per_prompt=4))
    assert plan.room.resident == 100
    found = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert found["memory"]["resident_documents"] == 100


def test_notes_say_what_goes_wrong() -> None:
    demand = Demand(10**6, 40_000, 64, 20)
    notes = " ".join(plan_capacity(MODEL, "20GiB", demand).notes)
    assert "larger max_chunk_tokens" in notes and "some prompts will wait" in notes and "positions" in notes
    assert "larger max_chunks" in " ".join(plan_capacity(MODEL, "80GiB", Demand(10**6, 16)).notes)
    assert "larger blocks" in " ".join(plan_capacity(MODEL, "80GiB", Demand(10**6, 16), block_size=1).notes)
    assert "is kept twice, unless chunk_context is system" in notes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"documents": 0}, "documents must be a whole number between 1 and 1,000,000,000, got 0"),
        ({"tokens_per_document": 10**8}, "tokens_per_document must be"),
        ({"concurrency": 1.5}, "concurrency must be"),
        ({"documents": 3}, "5 different documents cannot be drawn from 3"),
    ],
)
def test_demands_out_of_range_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        Demand(**{"documents": 100, "tokens_per_document": 10} | settings)


def test_sizes_and_shares_of_headroom_are_read() -> None:
    assert parse_headroom("10%", 1_000) == 100 and parse_headroom("1KiB", 10**6) == 1_024
    for text in ("100%", "-1%", "some%", "lots"):
        with pytest.raises(InvalidConfig):
            parse_headroom(text, 1_000)
