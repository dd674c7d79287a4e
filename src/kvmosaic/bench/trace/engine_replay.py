"""Replay by the engine: the prompts of a trace, scaled down, answered by a model in this process.

It may be a tiny random one, with a tokenizer whose tokens are the words of the trace.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvmosaic.bench.models import random_llama
from kvmosaic.bench.progress import Watcher
from kvmosaic.bench.trace.prompts import PromptWriter, RequestTexts
from kvmosaic.bench.trace.replay import ReplayRow, Variant, replay, reused_documents
from kvmosaic.bench.trace.trace import Trace
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.config.setting import parse_bytes
from kvmosaic.errors import InvalidTrace, PromptTooLong
from kvmosaic.llm import LLM
from kvmosaic.model import load_model
from kvmosaic.prompt import Prompt, SegmentKind
from kvmosaic.sampling import RequestOutput, SamplingParams

_BLOCK_SIZE = 4
"""Small, as the scaled texts are: only full blocks of a system text are cached."""
_TOKENS_PER_WORD = 4
_MIN_TOKENS = 2**16
_RULES = {"all": "all", "first": "before:\n", "auto": "auto"}
"""The first block is the first line."""


class EngineReplay:
    """Replays with one model; a context manager."""

    name = "engine"

    def __init__(self, folder: Path, limit: str, num_words: int, num_threads: int | None = None) -> None:
        """Loads a model; the self-check included.

        Args:
            folder: of the model.
            limit: memory for each pool, such as 1GiB; less is taken if all prompts need less.
            num_words: of all prompts; a word may be several tokens.
            num_threads: that compute.

        Raises:
            ModelError: it cannot be loaded.
        """
        model = load_model(folder, dtype="auto", local_files_only=True)
        wanted = (num_words * _TOKENS_PER_WORD + _MIN_TOKENS) * model.bytes_per_token()
        capacity = min(parse_bytes(limit), wanted)
        self.llm = LLM(
            model,
            chunk_cache_config=ChunkCacheConfig(
                chunk_cache_size=capacity,
                block_size=_BLOCK_SIZE,
                max_chunks=10**6,
                position_strategy="sequential",
                repair="none",
                oversized_prompts="error",
            ),
            engine_config=EngineConfig(request_cache_size=capacity, num_threads=num_threads),
        )

    def __enter__(self) -> EngineReplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def replay(self, trace: Trace, writer: PromptWriter, variant: Variant, watcher: Watcher) -> ReplayRow:
        """Answers the requests one after the other, with empty caches at the beginning.

        After an interrupt, the figures so far, with `is_complete` off.

        Raises:
            InvalidTrace: a prompt that is too long for the model.
        """
        self.llm.engine.kv_cache.reset()
        row = ReplayRow(variant.name, variant.about, self.name)
        try:
            replay(row, trace, lambda request: self._answer(writer.texts(request), variant, row), watcher)
        except PromptTooLong as error:
            raise InvalidTrace(f"{error}; or scale the trace down with --block-tokens") from None
        return row

    def _answer(self, texts: RequestTexts, variant: Variant, row: ReplayRow) -> None:
        prompt = Prompt.from_documents(texts.documents, texts.rest, system=texts.system or None)
        prompt = self.llm.encoder.encode(prompt, preamble=_RULES[variant.preamble])
        num_documents = sum(chunk.num_tokens for chunk in prompt.chunks)
        num_system = sum(segment.num_tokens for segment in prompt.segments[:2] if segment.kind in _BEFORE_DOCUMENTS)
        if variant.is_plain:
            prompt = prompt.joined()
        prompt = replace(prompt, documents_order=variant.documents_order)
        one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (output,) = self.llm.generate([prompt], one_token, chunk_context=variant.chunk_context)
        row.add((num_documents, _num_reused(output, num_system, num_documents)), _prompt_tokens(output))


_BEFORE_DOCUMENTS = (SegmentKind.SYSTEM, SegmentKind.TEXT)


def _prompt_tokens(output: RequestOutput) -> tuple[int, int]:
    return output.reuse.num_tokens, output.reuse.reused_tokens


def _num_reused(output: RequestOutput, num_system: int, num_documents: int) -> int:
    chunks = [segment for segment in output.reuse.segments if segment.kind == "chunk"]
    if chunks:
        return sum(segment.reused_tokens for segment in chunks)
    return reused_documents(output.reuse.reused_tokens, num_system, num_documents)


MAX_WORDS = 2**16
_UNKNOWN = "<unk>"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n\n{% endfor %}"
_MAX_POSITIONS = 2**17


def save_tiny_model(folder: Path, writer: PromptWriter) -> Path:
    """Writes a Llama of two small layers, and the tokenizer; returns the folder.

    Raises:
        InvalidTrace: the requests have more different blocks than the tokenizer may have words.
    """
    if writer.vocab_size > MAX_WORDS:
        raise InvalidTrace(
            f"these requests have {writer.vocab_size} different blocks, and the tiny model knows "
            f"{MAX_WORDS} words; replay fewer with --requests, or name another model"
        )
    words = {word: index for index, word in enumerate((*writer.words(), _UNKNOWN))}
    tokenizer = Tokenizer(models.WordLevel(words, _UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = random_llama(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=True,
    )
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=_UNKNOWN)
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder
