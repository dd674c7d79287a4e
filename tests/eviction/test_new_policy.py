"""A policy of one's own by name: one class and one entry in `POLICIES`, and every face offers it."""

from __future__ import annotations

import pytest

from kvmosaic import ChunkCacheConfig
from kvmosaic.cache import KVCache
from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import POLICIES, Candidate
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt
from kvmosaic.server.read import read_settings


class DearestPerByte:
    """What costs least to compute again, per byte and hit, is evicted first, however long ago it was used."""

    name = "dearest"

    def rank(self, candidate: Candidate) -> float:
        return (1 + candidate.hits) * candidate.compute_seconds / candidate.num_bytes


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(POLICIES, "dearest", DearestPerByte)
    return "dearest"


def test_configuration_and_server_offer_it(policy: str) -> None:
    assert ChunkCacheConfig(eviction=policy).eviction == policy
    assert read_settings({"eviction": policy}).llm_config().chunk_cache.eviction == policy
    for refused in (lambda: ChunkCacheConfig(eviction="fifo"), lambda: read_settings({"eviction": "fifo"})):
        with pytest.raises(InvalidConfig, match="dearest"):
            refused()


def test_it_is_absent_elsewhere() -> None:
    with pytest.raises(InvalidConfig, match="'lru', 'lfu', 'gdsf' or 'priority'"):
        read_settings({"eviction": "dearest"})


def test_it_knows_hits_compute_time_and_bytes(policy: str) -> None:
    config = ChunkCacheConfig(block_size=4, eviction=policy)
    kv_cache = KVCache("model", config, request_blocks=64, chunk_blocks=8, bytes_per_block=4_096)
    seconds = {"cheap": 0.001, "dear": 0.1, "small": 0.002}
    tokens = {"cheap": range(8), "dear": range(10, 18), "small": range(20, 24)}

    def use(name: str) -> None:
        prompt = Prompt.from_tokens([1], [list(tokens[name])], [99], names=[name])
        allocation = kv_cache.allocate(kv_cache.plan(arrange(prompt)))
        for index, span in enumerate(allocation.spans):
            chunk = span.chunk
            if span.is_owner and chunk is not None and not chunk.num_computed:
                chunk.compute_ms = 1e3 * seconds[name]
            if chunk is None or span.is_owner:
                kv_cache.advance(allocation, index, span.num_tokens - span.num_computed)
        kv_cache.release(allocation)

    for name in ("dear", "cheap", "small"):
        use(name)
    expected = sorted(seconds, key=lambda name: seconds[name] / -(-len(tokens[name]) // 4))
    assert [chunk.names[0] for chunk in kv_cache._chunks.total.in_order()] == expected == ["cheap", "small", "dear"]
    for _ in range(200):
        use("cheap")
    assert [chunk.names[0] for chunk in kv_cache._chunks.total.in_order()] == ["small", "dear", "cheap"]
