"""The server as a process and the commands, on a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.real.prompts import DOCUMENTS, QUESTIONS, SYSTEM
from support.server import ServeCommand
from typer.testing import CliRunner, Result

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams, TierConfig
from kvmosaic.cli import app
from kvmosaic.model.cpu.prepack import cpu_has_bfloat16

LOADING_SECONDS = 300.0
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[0]}]
NAMED = [{"id": f"d{number}", "text": text} for number, text in enumerate(DOCUMENTS)]
HOW = {"position_strategy": "sequential", "chunk_context": "system", "repair": "none"}
FLAGS = [part for name, value in HOW.items() for part in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"disk:{tmp_path_factory.mktemp('tier')}?quota=1GiB"


@pytest.fixture(scope="module")
def expected(loaded, disk: str) -> str:
    """What our engine answers in this process, which leaves its documents on the disk."""
    with LLM(
        loaded,
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size="32MiB", **HOW),
        engine_config=EngineConfig(request_cache_size="32MiB"),
        tier_config=TierConfig(chunk_tier=(disk,), chunk_loading="always"),
        self_check=False,
    ) as llm:
        (output,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24), documents=NAMED)
    return output.outputs[0].text


@pytest.fixture(scope="module")
def served(model_file: Path, expected: str, disk: str) -> Iterator[ServeCommand]:
    """A process of its own, over the same disk; a line says what became of the weights."""
    tiers = ("--chunk-tier", disk, "--chunk-loading", "always")
    with ServeCommand(*FLAGS, *tiers, "--served-model-name", "smol", model=str(model_file)) as command:
        command.url = command.until(r"ready +(http\S+)", LOADING_SECONDS)[1]
        yield command
        command.stop()
        assert command.wait() == 0


def test_another_process_finds_the_documents_and_answers_real_clients_in_any_order(served, expected: str) -> None:
    def ask(documents: list[dict[str, str]]) -> tuple[str, dict[str, str]]:
        reply = client.chat.completions.create(
            model="smol",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=24,
            extra_body={"documents": documents},
        )
        notes = {each["id"]: each["tier"] or each["action"] for each in reply.kvmosaic["documents"]}
        return reply.choices[0].message.content, notes

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        assert [model.id for model in client.models.list()] == ["smol"]
        first, found = ask(NAMED)
        assert first == expected
        assert set(found.values()) == {"disk"}
        _, again = ask(NAMED[::-1])
        assert set(again.values()) == {"device"}


def test_the_server_says_what_memory_a_file_takes(served) -> None:
    said = "SmolLM2-135M-Instruct.Q4_1.gguf (98.4 MB in the file, Q4_1) is dequantized to float32: 538.1 MB of weights"
    assert said in served.log


def called(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


def test_check_passes_in_the_type_that_this_machine_takes(model_file: Path) -> None:
    result = called("check", model_file, "--engine", "transformers")
    dtype = "bfloat16" if cpu_has_bfloat16() else "float32"
    assert f"is dequantized to {dtype}" in " ".join(result.stderr.split())


def test_run_answers_with_the_chunk_cache_on(model_file: Path, tmp_path: Path, expected: str) -> None:
    for document in NAMED:
        (tmp_path / f"{document['id']}.txt").write_text(document["text"])
    asked = ("--documents", tmp_path, "--question", QUESTIONS[0], "--system", SYSTEM, "--max-tokens", 24)
    result = called("run", model_file, *asked, *FLAGS, "--dtype", "float32", "--json")
    assert json.loads(result.stdout)["text"].strip() == expected.strip()
    assert "the chunk cache is off" not in result.stderr
