"""Commands in forks of one process that has imported what commands import, which takes each of them seconds otherwise.

What a command does until it has imported everything (probes and signals meanwhile, messages that come before torch)
needs a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import TextIO

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "kvmosaic.cli",
        "kvmosaic.server.launch",
        "kvmosaic.server.model_loader",
        "kvmosaic.server.app",
        "kvmosaic.server.services",
        "kvmosaic.assembly",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)


class ForkedCommand:
    """`kvmosaic ARGUMENTS` in a fork, used like a `subprocess.Popen` whose standard error is a pipe of text."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        read, write = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(tuple(arguments), dict(environment), write), daemon=True)
        self._process.start()
        write.close()
        self.stderr: TextIO = os.fdopen(os.dup(read.fileno()), encoding="utf-8")
        read.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        assert wait([self._process.sentinel], seconds), f"the command does not end within {seconds} s"
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: tuple[str, ...], environment: dict[str, str], error: Connection) -> None:
    """In the fork."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(error.fileno(), 2)
    error.close()
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = ["kvmosaic", *arguments]
    from kvmosaic.cli import main

    main()
