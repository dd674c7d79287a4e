"""Documents of more tokens than the model's positions: every face says so, and which strategy answered, and why."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.asking import chat
from support.server import RunningServer, loaded_reader
from typer.testing import CliRunner

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams
from kvmosaic.assembly import bundled_reader
from kvmosaic.cli import app
from kvmosaic.errors import PromptTooLong
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.report import ChunkOutcome, ComposedReport

POSITIONS = 128
NAMES = ("Fenbury", "Tolbury", "Quinan", "Oakham", "Marl", "Denwick", "Silver", "Heron", "Amber", "Pearl")
DOCUMENTS = [
    {"id": name, "text": f"The ferry of {name} was built in {1800 + number}. It lies on the river."}
    for number, name in enumerate(NAMES)
]
MESSAGES = [{"role": "user", "content": "When was the ferry of Marl built?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
BEYOND = re.compile(r"the prompt's (\d+) tokens do not fit the model's 128 positions")
AUTO = f"{POSITIONS} positions, so auto lets documents overlap"


def small(**config: object) -> LLM:
    return LLM(
        loaded_reader(),
        self_check=False,
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size="8MiB", **config),
        engine_config=EngineConfig(max_model_len=POSITIONS, request_cache_size="8MiB"),
    )


def test_report_says_that_a_prompt_is_longer_than_the_positions_and_why_documents_overlap() -> None:
    with small() as llm:
        (output,) = llm.chat(MESSAGES, GREEDY, documents=DOCUMENTS)
        said = output.reuse.composition
        assert said.startswith("composed (shared): ") and AUTO in said
        found = BEYOND.search(said)
        assert found is not None and int(found[1]) == output.reuse.num_tokens > POSITIONS
        assert said in str(output.reuse) and output.reuse.to_dict()["composition"] == said
        (output,) = llm.chat(MESSAGES, replace(GREEDY, repair="none"), documents=DOCUMENTS[:2])
        assert output.reuse.composition.startswith("composed (sequential): ")
        assert "positions" not in output.reuse.composition


def test_report_gives_no_reason_where_the_caller_chose_shared_positions() -> None:
    with small() as llm:
        (output,) = llm.chat(MESSAGES, GREEDY, documents=DOCUMENTS, position_strategy="shared")
        assert BEYOND.search(output.reuse.composition) and "auto" not in output.reuse.composition
        (output,) = llm.chat(MESSAGES, GREEDY, documents=DOCUMENTS[:2], position_strategy="shared")
        assert "positions" not in output.reuse.composition
        with pytest.raises(PromptTooLong):
            llm.chat(MESSAGES, GREEDY, documents=DOCUMENTS, position_strategy="sequential")


def test_report_names_the_limit_exactly_where_auto_changes_the_strategy() -> None:
    with small() as llm:
        lengths = {}
        for number in range(40):
            messages = [{"role": "user", "content": MESSAGES[0]["content"] + " 7" * number}]
            prompt = llm.compose(messages, documents=DOCUMENTS[:4])
            (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
            said = output.reuse.composition
            assert ("(shared)" in said) == bool(BEYOND.search(said)) == (prompt.num_tokens + 1 > POSITIONS)
            lengths[prompt.num_tokens] = said
        assert {POSITIONS - 1, POSITIONS} <= set(lengths)


def test_server_says_it() -> None:
    with (
        RunningServer(max_model_len=POSITIONS, position_strategy="auto") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        reply = chat(http, messages=MESSAGES, documents=DOCUMENTS, max_tokens=4)
    assert AUTO in reply["kvmosaic"]["composition"]


def test_command_line_says_it(tmp_path: Path) -> None:
    model, documents = tmp_path / "model", tmp_path / "documents"
    shutil.copytree(bundled_reader(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    documents.mkdir()
    for document in DOCUMENTS:
        (documents / f"{document['id']}.txt").write_text(document["text"])
    arguments = ["run", str(model), "--documents", str(documents), "-q", "Where?", "--max-tokens", "4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert AUTO in " ".join(result.stdout.split())


def test_report_inside_vllm_says_it() -> None:
    shape = Composition(system=4, chunks=(60, 60), position_strategy="shared")
    outcomes = (ChunkOutcome("cached"), ChunkOutcome("cached"))
    for trained, is_beyond in ((128, True), (200, False), (None, False)):
        report = ComposedReport(shape.layout(range(130)), 0, outcomes, max_positions=trained)
        assert bool(BEYOND.search(report.to_json()["composition"])) is is_beyond
