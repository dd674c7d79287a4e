"""The real app under the real uvicorn, on a free loopback port."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn

from kvmosaic.assembly import AnyModel, bundled_reader
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel, load_model, quiet_libraries
from kvmosaic.server.app import build_app
from kvmosaic.server.metrics.request_log import RequestRecord
from kvmosaic.server.services import Services, build_services
from kvmosaic.server.settings import ServerSettings
from kvmosaic.tiers import Tier
from support.forks import ForkedCommand

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


@cache
def loaded_reader(dtype: str = "float32") -> LoadedModel:
    """The bundled model, loaded once for all tests of a process."""
    quiet_libraries()
    return load_model(bundled_reader(), dtype=dtype, device="cpu")


class RunningServer:
    """The app with the bundled model, served from a thread.

        with RunningServer(max_queue=1) as server:
            httpx.get(server.url + "/livez")

    `server.services` are those of the app; use `server.call` to touch what belongs to its event loop.
    """

    def __init__(
        self,
        *,
        loaded: AnyModel | None = None,
        self_check: bool = False,
        tiers: Sequence[Tier] | None = None,
        span_exporter: SpanExporter | None = None,
        port: int = 0,
        **settings: Any,
    ) -> None:
        small = {"dtype": "float32", "device": "cpu", "chunk_cache_size": "32MiB", "request_cache_size": "32MiB"}
        small["documents_dir"] = "none"
        fixed = {"position_strategy": "shared", "repair": "none"} if settings.get("profile") is None else {}
        self.settings = ServerSettings(**{**small, **fixed, **settings})
        self._loaded = loaded
        self._self_check = self_check
        self._tiers = tiers
        self._span_exporter = span_exporter
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server-under-test", daemon=True)
        self.port = port
        self.records: list[RequestRecord] = []
        """Of all requests that have ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        return self.settings.model_names[0]

    def call(self, function: Any, *args: Any) -> Any:
        """The result of `function(*args)`, which may be a coroutine function, on the server's event loop."""

        async def run() -> Any:
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(300)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        if not self._ready.wait(300) or self._failure is not None:
            raise RuntimeError("the server did not start") from self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        settings = self.settings
        self.llm = LLM(
            self._loaded or loaded_reader(settings.dtype),
            **settings.llm_config(self._tiers).keywords(),
            self_check=self._self_check,
        )
        self.services: Services = build_services(settings, self.llm, span_exporter=self._span_exporter)
        self.services.records.listen(self.records.append)
        self.app = build_app(self.services)
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=self.port, log_level="error", lifespan="off", timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            if serving.done():
                await serving
            await asyncio.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        await serving
        await self.services.close()


def metric(url: str, name: str) -> float:
    """The sum of all series of a metric."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def send(server: RunningServer, path: str, content: Any = None) -> socket.socket:
    """Sends a request and leaves its reply unread; whoever closes the socket is a client that leaves."""
    body = b"" if content is None else json.dumps(content).encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head = f"POST {path} HTTP/1.1\r\n{fields}\r\n"
    client.sendall(head.encode() + body)
    return client


class ServeCommand:
    """`kvmosaic serve` in a process of its own, on a port it chose itself.

        with ServeCommand("--max-queue", "1") as command:
            httpx.get(command.url + "/readyz")

    The process is a fork of one that has imported everything, unless it `is_fresh`, as for tests of a start.
    """

    def __init__(self, *arguments: str, model: str = "reader", is_fresh: bool = False, **variables: str) -> None:
        self._program: tuple[str, ...] | None = ("-m", "kvmosaic") if is_fresh else None
        self._arguments: tuple[str, ...] = ("serve", model, "--port", "0", "--dtype", "float32")
        self._arguments += ("--chunk-cache-size", "32MiB", "--request-cache-size", "32MiB", *arguments)
        self._environment = {"KVMOSAIC_DOCUMENTS_DIR": "none", **os.environ, **variables}
        self.log = ""
        self.url = ""

    @classmethod
    def typed(cls, *arguments: str) -> ServeCommand:
        """With these arguments alone, and the environment as it is."""
        command = cls(is_fresh=True)
        command._arguments, command._environment = ("serve", *arguments, "--port", "0"), dict(os.environ)
        return command

    def __enter__(self) -> ServeCommand:
        self.process: subprocess.Popen[str] | ForkedCommand
        if self._program is None:
            self.process = ForkedCommand(self._arguments, self._environment)
        else:
            command = (sys.executable, *self._program, *self._arguments)
            self.process = subprocess.Popen(
                command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=self._environment
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def until(self, text: str, seconds: float = 300.0) -> re.Match[str]:
        """Waits for a line; `text` is a pattern."""
        wait_until(lambda: re.search(text, self.log) or self.process.poll() is not None, seconds)
        match = re.search(text, self.log)
        assert match is not None, self.log
        return match

    def until_ready(self) -> ServeCommand:
        self.url = self.until(r"ready +(http\S+)")[1]
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 120.0) -> int:
        """The exit code; the log is complete then."""
        code = self.process.wait(seconds)
        self._reader.join(60)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line


@contextmanager
def serving(*arguments: str) -> Iterator[ServeCommand]:
    """`kvmosaic serve` as a person types it: until it is ready, and to an orderly end."""
    with ServeCommand.typed(*arguments) as command:
        yield command.until_ready()
        command.stop()
        assert command.wait() == 0, command.log


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Waits for something that another thread brings about; only what hangs takes long, even on a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(0.01)
