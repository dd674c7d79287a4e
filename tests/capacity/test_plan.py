"""Plans in numbers that can be worked out by hand."""

from __future__ import annotations

import json
import sys
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.capacity import Demand, ModelFacts, Speed, TierSpeed, plan_capacity, spec_speed
from kvmosaic.capacity.plan import MAX_BLOCKS, parse_headroom
from kvmosaic.capacity.plot import by_memory
from kvmosaic.capacity.speed import FirstToken, parse_rate, parse_seconds
from kvmosaic.capacity.tier_plan import MARGIN, codec_share, plan_tier
from kvmosaic.errors import InvalidConfig
from kvmosaic.layers import LayerShape
from kvmosaic.layout import arrange
from kvmosaic.memory import storage
from kvmosaic.tiers import cost

GIB = 2**30
LAYERS = tuple(LayerShape(index, 2, 64, 64, index=index, num_query_heads=8) for index in range(4))
MODEL = ModelFacts("small", "bfloat16", 2, 10**8, 2 * 10**8, 2 * 10**8, 9 * 10**7, 10**7, 32_768, LAYERS)
"""4 layers of 2 key heads of 64: 2,048 bytes per token, 32 KiB per block."""
SPEED = Speed(1e12, 1e11, "by hand", layer_seconds=0.0)
DEMAND = Demand(10_000, 1_000, 8, 4, system_tokens=100, question_tokens=30, answer_tokens=50)


def test_import_needs_no_torch() -> None:
    code = "import sys, kvmosaic.capacity; print({'torch', 'transformers'} & set(sys.modules))"
    assert run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout == "set()\n"


def test_numbers_that_live_elsewhere_are_the_same_here() -> None:
    assert storage.MAX_BLOCKS == MAX_BLOCKS
    assert MARGIN == cost._MARGIN


def test_memory_is_divided_without_a_rest() -> None:
    room = plan_capacity(MODEL, GIB, DEMAND, SPEED, headroom="100MiB").room
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
    room = plan_capacity(MODEL, 202 * 10**6, demand, SPEED, headroom=0).room
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
        plan_capacity(MODEL, "150MiB", DEMAND, SPEED)
    with pytest.raises(InvalidConfig, match="small does not fit into 80 bytes: "):  # of somebody who left out the unit
        plan_capacity(MODEL, "80", DEMAND, SPEED)
    with pytest.raises(InvalidConfig, match=r"left for documents, and one of 1,000 tokens takes .*; take a larger"):
        plan_capacity(MODEL, 2 * 10**8 + 47 * 32_768, DEMAND, SPEED, headroom=0)


def test_first_token_is_what_has_to_be_multiplied_or_read() -> None:
    first = FirstToken(MODEL, SPEED, DEMAND)
    attended = 4 * 8 * (2 * 64 + 2 * 64)  # of a pair: 4 layers, 8 heads, a product and a sum for each number
    question = 2 * (9e7 * 30 + 1e7) + attended * (30 * 4_100 + 30 * 31 / 2)
    read = (2e8 + 2_048 * 4_130) / 1e11
    assert first.prompt_seconds(0) == pytest.approx(max(question / 1e12, read))
    document = 2 * 9e7 * 1_000 + attended * (1_000 * 100 + 1_000 * 1_001 / 2)
    assert first.document_seconds(1_000) == pytest.approx(document / 1e12)
    assert first.prompt_seconds(4) == pytest.approx((question + 4 * document) / 1e12)


def test_expected_first_token_follows_the_hit_rate() -> None:
    first = FirstToken(MODEL, SPEED, DEMAND)
    nothing, everything = first.prompt_seconds(4), first.prompt_seconds(0)
    assert first.expected_seconds(0.0) == nothing and first.expected_seconds(1.0) == everything
    for rate in (0.2, 0.5, 0.9):
        speedup = nothing / first.expected_seconds(rate)
        assert speedup == pytest.approx(1 / (1 - rate * first.saved_share()), rel=0.02)


@given(st.floats(1e-5, 1.0), st.floats(1e5, 1e12), st.sampled_from(["none", "int8"]))
def test_break_even_is_the_shortest_document_that_is_worth_loading(latency: float, rate: float, codec: str) -> None:
    first = FirstToken(MODEL, SPEED, DEMAND)
    plan = plan_tier(TierSpeed("disk", latency, rate, "by hand"), first, codec)

    def is_worth(num_tokens: int) -> bool:
        num_bytes = codec_share(codec, 2) * 2_048 * num_tokens
        return latency + num_bytes / rate < 0.9 * first.document_seconds(num_tokens)

    if plan.break_even_tokens is None:
        assert not is_worth(2**24)
    else:
        assert is_worth(plan.break_even_tokens) and not is_worth(plan.break_even_tokens - 1)
    assert plan.is_worth == is_worth(1_000) == (plan.least_hit_rate is not None)


def test_a_tier_is_asked_from_the_hit_rate_on_at_which_the_engine_asks_it() -> None:
    first = FirstToken(MODEL, SPEED, DEMAND)
    plan = plan_tier(TierSpeed("disk", 0.05, 1e9, "by hand"), first)
    assert plan.least_hit_rate is not None
    for share, is_asked in ((0.9, False), (1.1, True)):
        tier = cost.LoadCost()
        for _ in range(8):
            tier.note_miss(0.05)
            tier.note_hit(plan.entry_bytes, plan.load_seconds)
        tier.hit_rate = share * plan.least_hit_rate
        assert tier.is_worth(plan.entry_bytes, plan.compute_seconds) == is_asked


def test_codecs_take_the_share_that_they_write() -> None:
    import torch

    from kvmosaic.entries.codec import CODECS

    for name in ("none", "int8"):
        parts = CODECS[name].parts((64, 2, 64), torch.bfloat16, "tokens")
        assert codec_share(name, 2) == sum(part.num_bytes for part in parts) / (2 * 64 * 2 * 64)


def test_planned_tiers_add_what_the_device_does_not_have() -> None:
    tiers = [TierSpeed(kind, 1e-4, 1e10, "by hand", quota) for kind, quota in (("host", GIB), ("disk", None))]
    plan = plan_capacity(MODEL, GIB, DEMAND, SPEED, tiers=tiers)
    assert [stage.name for stage in plan.stages] == ["computed", "device", "host", "disk"]
    rates = [stage.hit_rate for stage in plan.stages]
    assert rates == sorted(rates) and rates[1] == plan.hit_rate and rates[3] == pytest.approx(1.0)
    seconds = [stage.first_token_seconds for stage in plan.stages]
    assert seconds == sorted(seconds, reverse=True)
    assert [tier.tier.kind for tier in plan.tiers] == ["host", "disk", "redis", "object"]
    assert plan.tiers[0].kept == GIB // (1_000 * 2_048) and plan.tiers[1].kept is None


def test_a_tier_slower_than_computing_adds_nothing() -> None:
    slow = TierSpeed("disk", 1.0, 1e6, "by hand")
    plan = plan_capacity(MODEL, GIB, DEMAND, SPEED, tiers=[slow])
    assert plan.tiers[0].found == 0.0 and plan.stages[-1].first_token_seconds == plan.stages[1].first_token_seconds


def test_everything_resident_is_always_found_and_json_has_no_infinity() -> None:
    plan = plan_capacity(MODEL, "8GiB", Demand(100, 1_000, documents_per_prompt=4), spec_speed("h100"))
    assert plan.room.resident == 100 and plan.hit_rate == 1.0
    found = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert found["uses_per_computation"] is None and found["memory"]["resident_documents"] == 100


def test_notes_say_what_goes_wrong() -> None:
    demand = Demand(10**6, 40_000, 64, 20)
    notes = " ".join(plan_capacity(MODEL, "20GiB", demand, SPEED).notes)
    assert "larger max_chunk_tokens" in notes and "some prompts will wait" in notes and "positions" in notes
    assert "larger max_chunks" in " ".join(plan_capacity(MODEL, "80GiB", Demand(10**6, 16), SPEED).notes)
    assert "larger blocks" in " ".join(plan_capacity(MODEL, "80GiB", Demand(10**6, 16), SPEED, block_size=1).notes)


def test_plot_begins_with_one_document_and_only_rises() -> None:
    points = by_memory(plan_capacity(MODEL, GIB, DEMAND, SPEED), 12)
    sizes, rates, seconds = zip(*points, strict=True)
    assert list(sizes) == sorted(sizes) and list(rates) == sorted(rates)
    assert list(seconds) == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"documents": 0}, "documents must be a whole number between 1 and 1,000,000,000, got 0"),
        ({"tokens_per_document": 10**8}, "tokens_per_document must be"),
        ({"concurrency": 1.5}, "concurrency must be"),
        ({"zipf": -1}, "zipf must be a number between 0 and 4, got -1"),
        ({"zipf": float("nan")}, "zipf must be"),
        ({"documents": 3}, "5 different documents cannot be drawn from 3"),
    ],
)
def test_demands_out_of_range_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        Demand(**{"documents": 100, "tokens_per_document": 10} | settings)


def test_rates_times_and_shares_are_read() -> None:
    assert parse_rate("3.35TB/s", "B") == 3.35e12 and parse_rate("25 GB/s", "B") == 25e9
    assert parse_rate("312T", "FLOP") == 312e12 and parse_rate("1e12", "FLOP") == 1e12
    assert parse_seconds("0.3ms") == pytest.approx(3e-4) and parse_seconds("50us") == pytest.approx(5e-5)
    assert parse_seconds(2) == 2.0 and parse_seconds("2 s") == 2.0
    assert parse_headroom("10%", 1_000) == 100 and parse_headroom("1KiB", 10**6) == 1_024
    for text in ("fast", "", "nan", "inf", "-3G", "1e30"):
        with pytest.raises(InvalidConfig):
            parse_rate(text, "B")
    for text in ("soon", "nan", "-1ms", "2e4"):
        with pytest.raises(InvalidConfig):
            parse_seconds(text)
    for text in ("100%", "-1%", "some%", "lots"):
        with pytest.raises(InvalidConfig):
            parse_headroom(text, 1_000)


def test_unknown_hardware_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidConfig, match=r"no figures of 'abacus'; choose from a100, h100"):
        spec_speed("abacus")
