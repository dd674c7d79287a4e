"""`vllm serve` in a fork of this process; its engine and its workers are forks of that, so it is up in seconds."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from support.vllm.forking import CONNECTOR, OPTIONS, PATIENCE_SECONDS, Fork

COMPOSING = ("--middleware=kvmosaic.vllm.ComposedDocuments",)
"""The flag of the front end, which tests of token ids do without."""
_STEP_SECONDS = 0.2


class ForkedServer(Fork):
    """A server with the plugin unless told otherwise; `http` is a client of it."""

    def __init__(
        self,
        model: Path,
        *arguments: str,
        plugin: bool = True,
        tensor_parallel_size: int = 1,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`port`: of loopback, for clients that need an address; None: a socket in a folder."""
        folder = Path(tempfile.mkdtemp(prefix="serve-"))
        self.path = folder / "http"
        self.port = port
        self.url = "http://small" if port is None else f"http://127.0.0.1:{port}"
        place = {"uds": self.path} if port is None else {"host": "127.0.0.1", "port": port}
        more = {"served-model-name": "small", **place, "tensor-parallel-size": tensor_parallel_size}
        said = [*server_arguments(model, plugin=plugin, **more), *arguments]
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "KVMOSAIC_DOCUMENTS_DIR": "none", **(environment or {})}
        super().__init__(lambda end: serve(said), variables)
        self.http = self.client()
        self._wait()

    def client(self) -> httpx.Client:
        """A client with connections of its own."""
        transport = httpx.HTTPTransport(uds=str(self.path)) if self.port is None else None
        return httpx.Client(transport=transport, base_url=self.url, timeout=PATIENCE_SECONDS)

    def complete(self, token_ids: list[int], **fields: Any) -> dict[str, Any]:
        """A reply of /v1/completions, greedy unless told otherwise."""
        asked = {"model": "small", "prompt": token_ids, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
        reply = self.http.post("/v1/completions", json={**asked, **fields})
        assert reply.status_code == 200, reply.text
        read: dict[str, Any] = reply.json()
        return read

    def stop(self) -> None:
        """Ends it and all that it started."""
        self.http.close()
        super().stop()

    def _wait(self) -> None:
        for _ in range(int(PATIENCE_SECONDS / _STEP_SECONDS)):
            ended, _ = os.waitpid(self.process_id, os.WNOHANG)
            assert not ended, f"the server is gone; its last words:\n{self.output()}"
            if self._is_listening():
                break
            time.sleep(_STEP_SECONDS)
        if self._is_listening() and self.http.get("/health").status_code == 200:
            return
        raise AssertionError(f"the server does not come up; its last words:\n{self.output()}")

    def _is_listening(self) -> bool:
        family, address = (
            (socket.AF_UNIX, str(self.path)) if self.port is None else (socket.AF_INET, ("127.0.0.1", self.port))
        )
        with socket.socket(family) as attempt:
            return not attempt.connect_ex(address)


def server_arguments(model: Path, *, plugin: bool = True, **more: Any) -> list[str]:
    """Arguments of `vllm serve` for a small model; `more` are options by their names."""
    names = ("dtype", "max_model_len", "block_size", "num_gpu_blocks_override", "max_num_seqs")
    options = {name.replace("_", "-"): OPTIONS[name] for name in names} | more
    flags = [f"--{name}={value}" for name, value in options.items()]
    if plugin:
        flags.append(f"--kv-transfer-config={json.dumps(CONNECTOR)}")
    flags += ["--enforce-eager", "--enable-prompt-tokens-details", "--distributed-executor-backend=mp"]
    return [f"--model={model}", *flags]


def serve(arguments: list[str]) -> None:
    """What `vllm serve` does, but that processes are forked where it would start them anew."""
    import uvloop
    from vllm.entrypoints.cli.serve import run_multi_api_server
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forking
    for module in (utils, multiproc_executor, coordinator):
        module.get_mp_context = lambda: forking
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    if (parsed.api_server_count or 1) > 1:
        run_multi_api_server(parsed)
    else:
        uvloop.run(entry.run_server(parsed))
