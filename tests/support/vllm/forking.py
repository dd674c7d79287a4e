"""A vLLM engine in a fork of this process, which does what it is told over a socket.

this process (vLLM imported, no engine)
  └─ fork: vllm.LLM, in one process and one thread      ← {"function": "module:name", "arguments": {...}}
                                                        → {"value": ...} or {"error": "..."}
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from support.vllm import inside
from support.vllm.asking import Answer, Ask
from support.vllm.loading import load_vllm

CONNECTOR = {"kv_connector": "kvmosaic", "kv_role": "kv_both"}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "max_logprobs": 32,
}
PATIENCE_SECONDS = 600
"""An engine that says nothing for so long hangs; no test is about time."""

_DIE_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG
_open_ends: list[socket.socket] = []


class Fork:
    """A fork of this process that runs `main(its end of a socket)`; what it prints goes to `log`."""

    def __init__(self, main: Callable[[socket.socket], None], environment: Mapping[str, str]) -> None:
        load_vllm()
        log, self.log = tempfile.mkstemp(prefix="vllm-", suffix=".log")
        self.socket, theirs = socket.socketpair()
        _open_ends.append(self.socket)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # newer Pythons warn of forks beside threads; none of them holds a lock here
            self.process_id = os.fork()
        if not self.process_id:
            os.environ.update(environment)
            _run(main, theirs, log)
        os.close(log)
        theirs.close()
        self.socket.settimeout(PATIENCE_SECONDS)

    def output(self) -> str:
        """The end of what it printed."""
        return Path(self.log).read_text(errors="replace")[-6000:]

    def stop(self) -> None:
        """Ends it and all that it started."""
        if self.socket in _open_ends:
            _open_ends.remove(self.socket)
            self.socket.close()
            with suppress(ProcessLookupError, ChildProcessError):  # it may be gone already
                os.killpg(self.process_id, signal.SIGKILL)
                os.waitpid(self.process_id, 0)
            Path(self.log).unlink()


def _run(main: Callable[[socket.socket], None], end: socket.socket, log: int) -> NoReturn:
    """The life of a fork: a process group of its own, no end of another fork's socket, no output on the terminal."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        for other in _open_ends:
            os.close(other.fileno())  # close() would wait for the files made from it
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        main(end)
        code = 0
        sys.stdout.flush()
    except BaseException:
        os.write(log, traceback.format_exc().encode())
    finally:
        os._exit(code)  # it must not go on as a second pytest


class ForkedEngine(Fork):
    """`vllm.LLM` in a fork, with the plugin unless told otherwise; environment and `prepare` are for the fork alone."""

    def __init__(
        self,
        model: Path,
        *,
        plugin: bool = True,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        options = {**OPTIONS, **options}
        if plugin:
            options.setdefault("kv_transfer_config", CONNECTOR)

        def main(end: socket.socket) -> None:
            prepare()
            inside.serve(str(model), options, end)

        super().__init__(main, environment or {})
        self._lines = self.socket.makefile("rw")
        self._read()  # it is up

    def call(self, function: Callable[..., Any] | str, **arguments: Any) -> Any:
        """Runs `function(inside engine, **arguments)` in the fork; both sides are JSON.

        Args:
            function: a name in `support.vllm.inside`, or a function of a module that was imported before the fork.
            arguments: numbers, texts, lists and dicts.
        """
        if isinstance(function, str):
            function = getattr(inside, function)
        name = f"{function.__module__}:{function.__qualname__}"
        self._lines.write(json.dumps({"function": name, "arguments": arguments}) + "\n")
        self._lines.flush()
        return self._read()

    def generate(self, asks: Sequence[Ask | Mapping[str, Any]], **fields: Any) -> list[Answer]:
        """Answers to all of them, asked at once; `fields` are given to every `Ask`."""
        wanted = [ask if isinstance(ask, Ask) else Ask(**ask) for ask in asks]
        return [Answer(**each) for each in self.call("answer", asks=[ask.to_json(**fields) for ask in wanted])]

    def ask(self, ask: Ask, **fields: Any) -> Answer:
        """One answer."""
        return self.generate([ask], **fields)[0]

    def play(self, asks: Sequence[Ask], at: Sequence[int], abort: Sequence[int | None]) -> list[Answer | None]:
        """Answers to requests that arrive and are aborted at given steps; see `inside.play`."""
        said = self.call("play", asks=[ask.to_json() for ask in asks], at=list(at), abort=list(abort))
        return [None if each is None else Answer(**each) for each in said]

    def _read(self) -> Any:
        try:
            line = self._lines.readline()
        except TimeoutError:
            line = ""
        if not line:
            raise AssertionError(f"the engine is gone or hangs; its last words:\n{self.output()}")
        said = json.loads(line)
        if "error" in said:
            raise AssertionError(f"inside the engine:\n{said['error']}\n{self.output()}")
        return said["value"]
