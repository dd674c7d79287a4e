"""The size of the chunk cache where nothing sets it: a share of the free memory."""

from __future__ import annotations

import pytest
from support.loaded import chatting_llama
from support.server import ServeCommand

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.errors import InvalidConfig

SMALL = EngineConfig(request_cache_size="4MiB")


def capacity(llm: LLM) -> int:
    kv_cache = llm.engine.kv_cache
    return kv_cache.chunk_pool.num_blocks * kv_cache.bytes_per_block


@pytest.mark.parametrize(("free", "expected"), [(2**32, 2**30), (2**20, 2**26)], ids=["share", "least"])
def test_the_default_is_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    monkeypatch.setattr("kvmosaic.assembly.free_memory_bytes", lambda device: free)
    with LLM(chatting_llama(), engine_config=SMALL) as llm:
        assert capacity(llm) == pytest.approx(expected, rel=0.01)


def test_a_size_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmosaic.assembly.free_memory_bytes", lambda device: 2**32)
    config = ChunkCacheConfig(chunk_cache_size="1MiB")
    with LLM(chatting_llama(), engine_config=SMALL, chunk_cache_config=config) as llm:
        assert capacity(llm) <= 2**20
    with pytest.raises(InvalidConfig, match="'lots' is not a size"):
        ChunkCacheConfig(chunk_cache_size="lots")


def test_the_server_says_what_the_cache_holds() -> None:
    with ServeCommand() as command:
        command.until_ready()
        assert command.until(r"chunks +32 MiB = ([0-9,]+) tokens, auto positions")
