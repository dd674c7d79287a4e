"""Engines for `vllm_plugin.py`: vLLM without and with the plugin, and our own, each in a process of its own."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

PLAIN, PLUGIN, IN_PLACE, OWN = "vLLM", "vLLM with kvmosaic", "the same, in place", "kvmosaic"
ENGINES = (PLAIN, PLUGIN, IN_PLACE, OWN)
MAX_POSITIONS = 4_096
BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt: token ids of the system text, the documents (none: an ordinary prompt) and the question."""

    system: Sequence[int]
    chunks: Sequence[Sequence[int]]
    question: Sequence[int]

    @property
    def token_ids(self) -> list[int]:
        """All of them, as an ordinary engine reads them."""
        return [*self.system, *(token for chunk in self.chunks for token in chunk), *self.question]


@dataclass(frozen=True, slots=True)
class Taken:
    """What some prompts took, all asked at once."""

    seconds: float
    """Until the last token of the last answer."""
    cpu_seconds: float
    """Of the whole process."""
    first_seconds: list[float]
    """Until the first token of each."""
    num_computed: int
    """Tokens that went through the model before the first answered tokens: of prompts, and of chunks for them."""
    decode_seconds: float = 0.0
    """From when all have their first token to the last token of the last answer; 0: not measured."""
    decode_cpu_seconds: float = 0.0
    num_replayed: int = 0
    """Forwards that read documents in place and were replayed as one CUDA graph."""
    tokens: list[list[int]] = field(default_factory=list)
    """The first tokens of each answer, at most 16."""


class Engine(Protocol):
    """What runs in a process of its own."""

    def answer(self, prompts: list[Asked], num_answer: int) -> Taken:
        """Answers prompts, all at once, greedily, with exactly `num_answer` tokens each."""

    def reset(self) -> None:
        """Forgets what it kept of earlier prompts."""


class VLLM:
    """vLLM, its engine in this process."""

    def __init__(
        self, folder: Path, dtype: str, *, document_reads: str, room: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """`document_reads`: "copy" or "in-place"; empty: without the plugin. `options`: others of vLLM."""
        with_plugin = bool(document_reads)
        os.environ["VLLM_PLUGINS"] = "kvmosaic" if with_plugin else ""
        os.environ["KVMOSAIC_DOCUMENT_READS"] = document_reads
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, room >> 30))
        import vllm

        connector = {"kv_transfer_config": {"kv_connector": "kvmosaic", "kv_role": "kv_both"}} if with_plugin else {}
        self._params = vllm.SamplingParams
        self._is_composing, self._reads_in_place = with_plugin, document_reads == "in-place"
        common = {
            "max_model_len": MAX_POSITIONS,
            "max_num_batched_tokens": MAX_POSITIONS,
            "max_num_seqs": 64,
            "block_size": BLOCK_SIZE,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "seed": 0,
        }
        self._llm = vllm.LLM(model=str(folder), dtype=dtype, **{**common, **connector, **(options or {})})
        self._num_scheduled = 0
        self._count(self._llm.llm_engine.engine_core.engine_core.scheduler)

    def _count(self, scheduler: Any) -> None:
        """Counts the tokens of every step: what vLLM tells of a prompt leaves out those of its chunks."""
        schedule = scheduler.schedule

        def counting(*arguments: Any, **options: Any) -> Any:
            scheduled = schedule(*arguments, **options)
            self._num_scheduled += scheduled.total_num_scheduled_tokens
            return scheduled

        scheduler.schedule = counting

    def answer(self, prompts: list[Asked], num_answer: int) -> Taken:
        engine = self._llm.llm_engine
        first: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        before, replayed = self._num_scheduled, self._num_replayed()
        begin, cpu = time.monotonic(), time.process_time()
        all_first: tuple[float, float] | None = None
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt.token_ids}, self._sampling(prompt, num_answer))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if self._reads_in_place and (said := output.kv_transfer_params) and said["kvmosaic"]["warnings"]:
                    raise RuntimeError(f"this is no measure of reading in place: {said['kvmosaic']['warnings']}")
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.monotonic() - begin)
                    tokens[output.request_id] = list(output.outputs[0].token_ids[:16])
            if all_first is None and len(first) == len(prompts):
                all_first = time.monotonic(), time.process_time()
        assert all_first is not None
        end, cpu_end = time.monotonic(), time.process_time()
        return Taken(
            end - begin,
            cpu_end - cpu,
            [first[str(number)] for number in range(len(prompts))],
            self._num_scheduled - before - len(prompts) * (num_answer - 1),
            end - all_first[0],
            cpu_end - all_first[1],
            self._num_replayed() - replayed,
            [tokens[str(number)] for number in range(len(prompts))],
        )

    def _num_replayed(self) -> int:
        if not self._reads_in_place:
            return 0
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        reader = get_kv_transfer_group()._worker.reader
        return 0 if reader is None or reader.replays is None else int(reader.replays.num_replays)

    def _sampling(self, prompt: Asked, num_answer: int) -> Any:
        extra: dict[str, Any] = {}
        if self._is_composing and prompt.chunks:
            from kvmosaic.vllm.contract import Composition

            composition = Composition(len(prompt.system), tuple(map(len, prompt.chunks)))
            extra = {"extra_args": {"kv_transfer_params": composition.to_params()}}
        return self._params(temperature=0, max_tokens=num_answer, ignore_eos=True, detokenize=False, **extra)

    def reset(self) -> None:
        assert self._llm.reset_prefix_cache()


class Own:
    """kvmosaic's engine; documents one after the other, as in vLLM."""

    def __init__(self, folder: Path, dtype: str, room: int) -> None:
        from kvmosaic import LLM, ChunkCacheConfig, EngineConfig

        self._llm = LLM(
            folder,
            dtype=dtype,
            chunk_cache_config=ChunkCacheConfig(
                chunk_cache_size=room // 2,
                position_strategy="sequential",
                chunk_context="system",  # vLLM has no companions
                repair="none",
            ),
            engine_config=EngineConfig(
                request_cache_size=room // 2, max_num_batched_tokens=MAX_POSITIONS, num_threads=1
            ),
        )

    def answer(self, prompts: list[Asked], num_answer: int) -> Taken:
        from kvmosaic import Prompt, SamplingParams

        asked = [
            Prompt.from_tokens(prompt.system, prompt.chunks, prompt.question)
            if prompt.chunks
            else Prompt.from_tokens(question=prompt.token_ids)
            for prompt in prompts
        ]
        begin, cpu = time.monotonic(), time.process_time()
        outputs = self._llm.generate(asked, SamplingParams(temperature=0, max_tokens=num_answer, ignore_eos=True))
        seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
        first = [output.metrics.first_token_time - begin for output in outputs]
        return Taken(seconds, cpu, first, sum(output.reuse.computed_tokens for output in outputs))

    def reset(self) -> None:
        self._llm.engine.kv_cache.reset()


class Forked:
    """An engine in a forked process, spoken to in JSON."""

    def __init__(
        self, name: str, folder: Path, dtype: str, room: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """`options`: others of vLLM."""
        context = multiprocessing.get_context("fork")
        self.name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, folder, dtype, room, options), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.is_alive()

    def answer(self, prompts: list[Asked], num_answer: int) -> Taken:
        """See `Engine.answer`."""
        rows = [[list(p.system), [list(c) for c in p.chunks], list(p.question)] for p in prompts]
        self._connection.send_bytes(json.dumps({"prompts": rows, "num_answer": num_answer}).encode())
        return Taken(**self._receive())

    def reset(self) -> None:
        """See `Engine.reset`."""
        self._connection.send_bytes(b'{"reset": true}')
        self._receive()

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _receive(self) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except EOFError:
            raise RuntimeError(f"{self.name} ended; what it printed says why") from None
        return reply


def _keep_memory() -> None:
    """Has glibc keep what is freed: else its guesses, which differ from process to process, cost up to a tenth."""
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        allocator.mallopt(mmap_threshold, 1 << 30)
        allocator.mallopt(trim_threshold, (1 << 31) - 1)


def _serve(
    connection: Connection, name: str, folder: Path, dtype: str, room: int, options: Mapping[str, Any] | None
) -> None:
    _keep_memory()
    reads = {PLUGIN: "copy", IN_PLACE: "in-place"}.get(name, "")
    engine: Engine
    if name == OWN:
        engine = Own(folder, dtype, room)
    else:
        engine = VLLM(folder, dtype, document_reads=reads, room=room, options=options)
    connection.send_bytes(b"{}")
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if message.get("reset"):
            engine.reset()
            connection.send_bytes(b"{}")
            continue
        taken = engine.answer([Asked(*row) for row in message["prompts"]], message["num_answer"])
        connection.send_bytes(json.dumps({field: getattr(taken, field) for field in taken.__slots__}).encode())
