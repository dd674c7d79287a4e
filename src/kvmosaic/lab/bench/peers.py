"""Peers: engines that are measured side by side, and what is read of a request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvmosaic.assembly import AnyModel
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.config.chunk_cache import AUTO_SIZE
from kvmosaic.errors import EngineError, InvalidConfig
from kvmosaic.lab.bench.models import Subject
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import RequestOutput, SamplingParams

OWN, OFF = "kvmosaic", "kvmosaic, chunk cache off"


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Measurements of one request."""

    first_seconds: float
    """Seconds from the submission of its batch to its first token."""
    token_seconds: float | None
    """Mean time per token after the first one; None for answers of one token."""
    num_prompt: int
    num_answer: int
    num_computed: int | None
    """Prompt tokens that went through the model; None if the engine does not report it."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Measurements of one batch."""

    seconds: float
    """Seconds from submission to its last token."""
    readings: tuple[RequestTimes, ...]
    kv_bytes: int | None = None
    """KV cache bytes that the engine holds right after, cached ones included; None: unknown."""


class Peer(Protocol):
    """One engine with one model in one dtype."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    @property
    def dtype(self) -> str:
        """The number format it computes in."""

    @property
    def is_ours(self) -> bool:
        """Whether it is our own engine with its chunk cache."""

    @property
    def process_id(self) -> int:
        """The process it runs in."""

    def reset(self) -> None:
        """Drops the KV cache of earlier prompts."""

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> BatchTimes:
        """Answers prompts, all at once, greedily, with exactly `num_answer` tokens each."""

    def close(self) -> None:
        """Shuts the engine down; calling it again is safe."""


def joined_ids(prompt: Prompt) -> list[int]:
    """All tokens of a prompt, as an ordinary engine reads them."""
    return [token for segment in prompt.segments for token in segment.token_ids or ()]


PEERS = ("on", "off", "transformers")
"""Our engine with the chunk cache on and off, and transformers `generate`."""
DEFAULT_CAPACITY = "4GiB"


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Which engines to start, and how."""

    names: tuple[str, ...] = PEERS
    strategy: str = "shared"
    capacity: str | None = None
    """Memory for each of our own pools; None: `DEFAULT_CAPACITY`, and in llama.cpp what `auto` gives."""
    threads: int = 1
    max_tokens: int = 4_096
    """Maximum length of a prompt with its answer, for engines that need it."""
    others: tuple[Callable[[Subject, str, PeerOptions], Peer | None], ...] = ()
    """Start further engines for a model in a number format, as `benchmarks/engines.py` does; None: not for this one."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in PEERS:
                raise InvalidConfig(f"there is no engine {name!r}; choose from " + ", ".join(PEERS))
        if "on" not in self.names:
            raise InvalidConfig("every ratio is against our own engine; add --engine on")


def open_peers(subject: Subject, options: PeerOptions, stack: ExitStack) -> tuple[list[Peer], list[str]]:
    """Starts every engine in every number format of the model; `stack` closes them.

    Returns:
        The engines, and notes: our attention backend, and the omitted engines.
    """
    peers: list[Peer] = []
    notes: list[str] = []

    def add(peer: Peer) -> None:
        stack.callback(peer.close)
        peers.append(peer)

    for dtype, model in subject.models.items():
        for name in ("on", "off"):
            if name in options.names:
                own = _open_own(model, options, is_on=name == "on")
                add(own)
                if name == "on":
                    notes.append(f"Our engine in {dtype}: {own.llm.attention}.")
                if name == "on" and not own.llm.has_chunk_cache:
                    notes.append(f"The chunk cache is off for {dtype}: {own.llm.chunk_cache_off_reason}.")
        is_plain = isinstance(model, LoadedModel)
        if "transformers" in options.names and is_plain and not subject.is_file:
            add(GeneratePeer(subject.source, dtype))
        for start in options.others:
            try:
                if (peer := start(subject, dtype, options)) is not None:
                    add(peer)
            except EngineError as error:
                notes.append(f"An engine in {dtype} is left out: {' '.join(str(error).split())}")
    return peers, notes


def _open_own(model: AnyModel, options: PeerOptions, *, is_on: bool) -> OwnPeer:
    capacity = options.capacity or (DEFAULT_CAPACITY if isinstance(model, LoadedModel) else None)
    return OwnPeer(model, enable_chunk_cache=is_on, strategy=options.strategy, capacity=capacity)


class OwnPeer:
    """kvmosaic; with the chunk cache off it is an ordinary engine with prefix caching."""

    def __init__(
        self, model: AnyModel, *, enable_chunk_cache: bool, strategy: str = "shared", capacity: str | None = None
    ) -> None:
        self.is_ours = enable_chunk_cache
        self.name = OWN if enable_chunk_cache else OFF
        self.dtype = model.weight_type
        self.process_id = os.getpid()
        self.llm = LLM(
            model,
            enable_chunk_cache=enable_chunk_cache,
            chunk_cache_config=ChunkCacheConfig(
                chunk_cache_size=capacity or AUTO_SIZE, position_strategy=strategy, repair="none"
            ),
            engine_config=EngineConfig(request_cache_size=capacity) if capacity else EngineConfig(),
        )

    def reset(self) -> None:
        """See `Peer.reset`."""
        self.llm.engine.kv_cache.reset()

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> BatchTimes:
        """See `Peer.answer`."""
        params = SamplingParams(temperature=0, max_tokens=num_answer, ignore_eos=True)
        begin = time.monotonic()
        outputs = self.llm.generate(list(prompts), params)
        seconds = time.monotonic() - begin
        return BatchTimes(seconds, tuple(_reading(output, begin) for output in outputs), self._kv_bytes())

    def close(self) -> None:
        """See `Peer.close`."""
        self.llm.close()

    def _kv_bytes(self) -> int:
        statistics = self.llm.get_chunk_cache_stats()
        bytes_per_block = self.llm.model.bytes_per_token() * self.llm.chunk_cache_config.block_size
        return (statistics.used_blocks + statistics.request_used_blocks) * bytes_per_block


def _reading(output: RequestOutput, begin: float) -> RequestTimes:
    metrics, num_answer = output.metrics, len(output.outputs[0].token_ids)
    assert metrics.first_token_time is not None and metrics.finished_time is not None, "it is finished"
    later = metrics.finished_time - metrics.first_token_time
    return RequestTimes(
        first_seconds=metrics.first_token_time - begin,
        token_seconds=later / (num_answer - 1) if num_answer > 1 else None,
        num_prompt=len(output.prompt_token_ids),
        num_answer=num_answer,
        num_computed=output.reuse.computed_tokens,
    )


class GeneratePeer:
    """transformers. Prompts of one length are answered as one batch without reuse, others one after the other."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.name = "transformers generate"
        self.dtype = dtype
        self.is_ours = False
        self.process_id = os.getpid()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True)
        self._model.eval()
        self._kept: tuple[list[int], Any] = ([], None)

    def reset(self) -> None:
        """See `Peer.reset`."""
        self._kept = ([], None)

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> BatchTimes:
        """See `Peer.answer`."""
        rows = [joined_ids(prompt) for prompt in prompts]
        begin = time.monotonic()
        if len(rows) > 1 and len({len(row) for row in rows}) == 1:
            self.reset()
            readings = self._answer(rows, num_answer, None, 0, begin)
        else:
            readings = [reading for row in rows for reading in self._answer_one(row, num_answer, begin)]
        seconds = time.monotonic() - begin
        cache = self._kept[1]
        held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values)) if cache else None
        return BatchTimes(seconds, tuple(readings), held)

    def close(self) -> None:
        """See `Peer.close`."""
        self.reset()

    def _answer_one(self, row: list[int], num_answer: int, begin: float) -> list[RequestTimes]:
        kept, cache = self._kept
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept, row[:-1], strict=False)))
        if cache is None or not same:
            cache, same = DynamicCache(config=self._model.config), 0
        else:
            if excess := cache.get_seq_length() - same:
                cache.crop(-excess)
            assert cache.get_seq_length() == same, "a cache is cut to the common beginning"
        return self._answer([row], num_answer, cache, same, begin)

    def _answer(
        self, rows: list[list[int]], num_answer: int, cache: Any, num_reused: int, begin: float
    ) -> list[RequestTimes]:
        ids = torch.tensor(rows)
        times = _TokenTimes()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=times,
            do_sample=False,
            max_new_tokens=num_answer,
            min_new_tokens=num_answer,
            pad_token_id=0,
        )
        if cache is not None:
            # the last token was sampled and never computed
            self._kept = (output[0].tolist()[: cache.get_seq_length()], cache)
        first, last = times.seconds[1], times.seconds[-1]
        reading = RequestTimes(
            first_seconds=first - begin,
            token_seconds=(last - first) / (num_answer - 1) if num_answer > 1 else None,
            num_prompt=ids.shape[1],
            num_answer=num_answer,
            num_computed=ids.shape[1] - num_reused,
        )
        return [reading] * len(rows)


class _TokenTimes(BaseStreamer):  # type: ignore[misc]  # transformers is read without its types
    """Streamer that records when transformers emits the prompt and each token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(time.monotonic())

    def end(self) -> None:
        pass
