"""A Redis server of a test's own, and a wire to it that can be slow, silent or cut."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import redis

from support.programs import installed


class RedisServer:
    """A real server on a Unix socket and, if asked, a port; nothing of it is kept."""

    def __init__(self, folder: Path, *arguments: str, port: int = 0) -> None:
        program = installed("redis-server", "redis-server")
        self.folder = folder
        self.port = port
        self.socket = folder / "redis.sock"
        self._command = [program, "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        self._command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *arguments]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.socket}"

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end = time.monotonic() + 120
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                log_text = (self.folder / "log").read_text(errors="replace")[-2000:]
                assert self.process.poll() is None, f"redis-server ended at once:\n{log_text}"
                assert time.monotonic() < end, f"redis-server does not start:\n{log_text}"
                time.sleep(0.01)

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), **options)  # type: ignore[arg-type]

    def hang(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        if self.process.poll() is None:
            self.go_on()
        self.kill()


class Wire:
    """A TCP proxy on loopback between a client and a server: each direction is a thread that reads and writes.

    `delay` seconds pass before every piece that comes back, of at most `piece` bytes; after `cut_after` bytes back the
    connection is closed, and after `silent_after` bytes nothing comes back any more.
    """

    def __init__(self, target: str | tuple[str, int]) -> None:
        self.target = target
        self.delay = 0.0
        self.piece = 2**16
        self.cut_after: int | None = None
        self.silent_after: int | None = None
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                continue
            far = socket.socket(socket.AF_UNIX if isinstance(self.target, str) else socket.AF_INET)
            try:
                far.connect(self.target)
            except OSError:
                near.close()
                far.close()
                continue
            self._open |= {near, far}
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_back: bool) -> None:
        passed = 0
        try:
            while data := source.recv(self.piece if is_back else 2**16):
                if is_back:
                    self._is_closed.wait(self.delay)
                    if self.silent_after is not None and passed + len(data) > self.silent_after:
                        self._is_closed.wait()
                    if self.cut_after is not None and passed + len(data) > self.cut_after:
                        sink.sendall(data[: self.cut_after - passed])
                        break
                sink.sendall(data)
                passed += len(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_closed.set()
        self._listener.close()
        for end in self._open:
            end.close()
