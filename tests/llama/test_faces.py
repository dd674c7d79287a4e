"""llama.cpp through `LLM` and the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.gguf import save_gguf
from support.llama_engine import reader_file
from typer.testing import CliRunner

from kvmosaic import LLM, ChunkCacheConfig, SamplingParams
from kvmosaic.cli import app
from kvmosaic.config import TierConfig
from kvmosaic.errors import InvalidConfig
from kvmosaic.model import LoadedModel

DOCUMENTS = ["The ferry goes to Oak Island.", "Anna lives in the red house.", "The mill was built in 1871."]
ASKED = [{"role": "user", "content": "Where does the ferry go?"}]


def answer(llm: LLM, documents: list[str]) -> tuple[str, int]:
    """The answer, and how many tokens were reused."""
    output = llm.chat(ASKED, SamplingParams(temperature=0, max_tokens=6, repair="none"), documents=documents)[0]
    assert output.reuse is not None
    return output.outputs[0].text, output.reuse.reused_tokens


def test_a_gguf_file_runs_in_llama_cpp_and_documents_are_reused_in_any_order() -> None:
    with LLM(reader_file("Q8_0"), chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB")) as llm:
        assert llm.model.engine_name == "llama.cpp" and llm.has_chunk_cache
        first, _ = answer(llm, DOCUMENTS)
        llm.warm(DOCUMENTS)
        again, reused = answer(llm, DOCUMENTS[::-1])
        assert len(first) > 2 and len(again) > 2 and reused > 20


def test_transformers_can_be_chosen() -> None:
    with LLM(reader_file("Q8_0"), engine="transformers") as llm:
        assert isinstance(llm.model, LoadedModel)
    with LLM(reader_file("Q8_0"), dtype="float32") as llm:
        assert isinstance(llm.model, LoadedModel), "auto takes the engine that does what is asked for"
    with pytest.raises(InvalidConfig, match="is for transformers"):
        LLM(reader_file("Q8_0"), engine="llama", dtype="float32")
    with pytest.raises(InvalidConfig, match="GGUF"):
        LLM("reader", engine="llama")


def test_documents_computed_by_one_engine_are_found_by_another(tmp_path: Path) -> None:
    tiers = TierConfig(chunk_tier=(f"disk:{tmp_path}/tier?quota=1GiB",), chunk_loading="always")
    with LLM(reader_file("Q8_0"), tier_config=tiers) as llm:
        first, _ = answer(llm, DOCUMENTS)
    with LLM(reader_file("Q8_0"), tier_config=tiers) as llm:
        again, reused = answer(llm, DOCUMENTS)
        assert again == first and reused > 20
    with pytest.raises(InvalidConfig, match="positions"):
        LLM(reader_file("Q8_0"), tier_config=TierConfig(chunk_tier=tiers.chunk_tier, chunk_codec="int8"))


def test_tools_are_called_beside_documents(tmp_path: Path) -> None:
    template = (
        "{% if tools %}<|begin|>tools: {{ tools | tojson }}, as <tool_call>{}</tool_call>{% endif %}"
        "{% for each in messages %}<|user|>{{ each.content }}<|end|>{% endfor %}"
    )
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": city}}
    path = save_gguf(tmp_path / "m.gguf", kind="Q8_0", metadata={"tokenizer.chat_template": template})
    with LLM(path, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB")) as llm:
        params = SamplingParams(temperature=0, max_tokens=60)
        output = llm.chat(ASKED, params, documents=DOCUMENTS, tools=[tool], tool_choice="required")[0]
        (call,) = output.outputs[0].tool_calls
        assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")


def test_check_tells_the_engine_and_compares() -> None:
    result = CliRunner().invoke(app, ["check", str(reader_file("Q8_0"))])
    assert result.exit_code == 0, result.output
    assert "llama.cpp" in result.output and "a moved document" in result.output and "passed" in result.output
