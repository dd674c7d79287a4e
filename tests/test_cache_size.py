"""The size of the chunk cache where nothing sets it: a share of the free memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.loaded import chatting_llama
from support.server import RunningServer, ServeCommand
from typer.testing import CliRunner

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.cli import app
from kvmosaic.documents import DocumentDraft
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
        assert command.until(r"documents +none stored; room for [0-9,]+ tokens, 32 MiB")


def test_the_server_says_how_many_stored_documents_fit(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with RunningServer(documents_dir=folder) as server:
        drafts = [(f"no/{n}", DocumentDraft(f"The ferry number {n} leaves at noon. " * 10)) for n in range(400)]
        server.services.documents.put_many("default", drafts)
    with ServeCommand("--chunk-cache-size", "3MiB", KVMOSAIC_DOCUMENTS_DIR=folder) as command:
        command.until_ready()
        fitting = re.search(r"documents +400 stored, about ([0-9]+) fit \(room for 512 tokens, 3 MiB\)", command.log)
    assert fitting and 2 <= int(fitting[1]) < 20, command.log


def test_check_plan_and_server_agree_on_the_type_and_the_bytes_of_a_token() -> None:
    planned = json.loads(CliRunner().invoke(app, ["plan", "reader", "--documents", "10", "--json"]).stdout)["model"]
    checked = CliRunner().invoke(app, ["check", "reader"]).stdout
    with RunningServer(dtype="auto") as server:
        model = server.services.llm.model
        served = (str(model.dtype).removeprefix("torch."), model.bytes_per_token())
    assert (planned["dtype"], planned["kv_bytes_per_token"]) == served
    assert f" in {served[0]} on cpu" in checked
    assert re.search(rf"one token takes +{served[1] / 2**10:g} KiB of cache", checked), checked
