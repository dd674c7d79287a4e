"""Tokens of a GGUF file are those of llama.cpp; where they are not, it is said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.gguf import save_gguf, tokenizer_entries
from support.llama_engine import llama_reader, reader_file
from typer.testing import CliRunner

from kvmosaic import LLM, ChunkCacheConfig, SamplingParams
from kvmosaic.assembly import bundled_reader
from kvmosaic.cli import app
from kvmosaic.llama.model import LlamaModel, load_llama
from kvmosaic.model.formats.gguf import tokenizer
from kvmosaic.model.formats.gguf.file import read_gguf
from kvmosaic.model.formats.gguf.weights import alone


def model_split_as(split: str, folder: Path) -> LlamaModel:
    return load_llama(save_gguf(folder / f"{split}.gguf", kind="Q8_0", metadata={"tokenizer.ggml.pre": split}))


def sentence_pieces(texts: Sequence[str]) -> dict[str, Any]:
    """Entries of a SentencePiece vocabulary: beginnings of the words of some texts, as many as the reader has."""
    words = [word for text in texts for word in text.split() if not word.startswith("<")]
    parts = [
        *"\u2581".join(words),
        *(before + word[:end] for word in words for end in range(1, 9) for before in BLANKS),
    ]
    special, count = ["<unk>", "<s>", "</s>", "<|user|>"], 3072
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [part for part in dict.fromkeys(parts) if part not in tokens]
    tokens = [*tokens, *(f"unused{number}" for number in range(count))][:count]
    kinds = [2, 3, 3, 3, *[6] * 256, *[1] * (count - 260)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.chat_template": "{% for each in messages %}<|user|>\n{{ each.content }}</s>\n{% endfor %}",
    }


BLANKS = ("", "\u2581")
REST = ("gpt-2", "qwen2", "llama-bpe", "exaone")
TEXTS = (" two  blanks ", "<|user|>where does<|user|> it go", "no\nblank", "١٢٣ und Äpfel 🎉")


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_sentence_piece_file_says_where_blanks_are_added(has_prefix: bool, tmp_path: Path) -> None:
    """As files of Llama 2, Mistral and TinyLlama say yes, and those of Phi-3 and Gemma no."""
    entries = {**sentence_pieces(TEXTS), "tokenizer.ggml.add_space_prefix": has_prefix}
    model = load_llama(save_gguf(tmp_path / "m.gguf", kind="Q8_0", metadata=entries))
    assert model.token_differences == ()
    for text in TEXTS:
        token_ids = model.tokenizer.encode(text)
        assert token_ids == model.file.tokenize(text), text
        if not text.startswith("<"):
            assert model.tokenizer.decode(token_ids, skip_special_tokens=True) == text
    model.file.close()


@pytest.mark.parametrize("split", ["smollm", *(pytest.param(each, marks=pytest.mark.slow) for each in REST)])
def test_texts_become_the_tokens_of_llama_cpp(split: str, tmp_path: Path) -> None:
    model = model_split_as(split, tmp_path)
    assert model.token_differences == ()
    for text in ("७ ١٢٣ 77 cats", "<|begin|><|user|>\nhi<|end|>", "a\x00b", ""):
        assert model.tokenizer.encode(text) == model.file.tokenize(text), text
    model.file.close()


@pytest.mark.slow
def test_a_word_that_llama_cpp_takes_for_an_end_is_no_difference(tmp_path: Path) -> None:
    """As files of Qwen2.5 say: "</s>" is an ordinary token there, and the ends of other families are control tokens."""
    known = tokenizer_entries(bundled_reader())
    tokens, merges, kinds = (known[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type"))
    last = max(number for number, kind in enumerate(kinds) if kind == 1)
    merges = [merge for merge in merges if merge.replace(" ", "") != tokens[last]]
    tokens[last] = "</s>"
    entries = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    model = load_llama(save_gguf(tmp_path / "m.gguf", kind="Q8_0", metadata=entries))
    assert model.file.tokenize("</s>") != model.tokenizer.encode("</s>"), "the word that it is about"
    assert model.token_differences == ()
    model.file.close()


@pytest.mark.slow
@pytest.mark.parametrize("entries", [{"tokenizer.ggml.pre": "smollm"}, "sentence pieces"])
def test_a_known_class_is_the_one_that_transformers_takes(
    entries: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = sentence_pieces(TEXTS) if isinstance(entries, str) else entries
    file = read_gguf(save_gguf(tmp_path / "m.gguf", kind="Q8_0", metadata=entries))
    found = []
    with alone(file) as (folder, named):
        for classes in (tokenizer._CLASSES, {}):
            monkeypatch.setattr(tokenizer, "_CLASSES", classes)
            found.append(tokenizer._facts(tokenizer._built(file, folder, {**named, "local_files_only": True})))
    assert file.architecture == "llama" and found[0] == found[1]


def test_template_and_ends_of_answers_are_those_of_the_file() -> None:
    model, header = llama_reader("Q8_0"), read_gguf(reader_file("Q8_0"))
    assert model.tokenizer.chat_template == header.metadata["tokenizer.chat_template"]
    assert model.eos_token_ids == (header.metadata["tokenizer.ggml.eos_token_id"],)


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
