"""Tokens of a GGUF file are those of llama.cpp; where they are not, it is said."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.gguf import save_gguf
from support.llama_engine import reader_file
from typer.testing import CliRunner

from kvmosaic import LLM, ChunkCacheConfig, SamplingParams
from kvmosaic.cli import app
from kvmosaic.llama.model import LlamaModel, load_llama


def model_split_as(split: str, folder: Path) -> LlamaModel:
    return load_llama(save_gguf(folder / f"{split}.gguf", kind="Q8_0", metadata={"tokenizer.ggml.pre": split}))


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "qwen2", "llama-bpe", "exaone"])
def test_texts_become_the_tokens_of_llama_cpp(split: str, tmp_path: Path) -> None:
    model = model_split_as(split, tmp_path)
    assert model.token_differences == ()
    for text in ("७ ١٢٣ 77 cats", "<|begin|><|user|>\nhi<|end|>", "a\x00b", ""):
        assert model.tokenizer.encode(text) == model.file.tokenize(text), text
    model.file.close()


def test_a_tokenizer_that_differs_is_told_once_and_shown_by_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvmosaic"):
        model = model_split_as("deepseek-llm", tmp_path)
    assert "becomes" in str(model.token_differences[0])
    (message,) = [record.getMessage() for record in caplog.records]
    assert "deepseek-llm.gguf" in message and str(model.token_differences[0]) in message
    model.file.close()
    result = CliRunner().invoke(app, ["check", str(tmp_path / "deepseek-llm.gguf")])
    assert result.exit_code == 0 and "other tokens than in llama.cpp" in result.output


def test_a_text_that_only_transformers_takes_for_a_token_is_answered() -> None:
    """`<|endoftext|>` is no token of this file; transformers adds it, with an id that the model does not have."""
    with LLM(reader_file("Q8_0"), chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB")) as llm:
        output = llm.generate("One <|endoftext|> two", SamplingParams(max_tokens=2, temperature=0))[0]
        assert max(output.prompt_token_ids) < llm.model.vocab_size
