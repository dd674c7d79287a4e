"""SIGHUP: keys, limits and logs change while requests go on; what is wrong changes nothing."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server import RunningServer, ServeCommand, wait_until

from kvmosaic.errors import InvalidConfig
from kvmosaic.server.settings import ServerSettings

KEYS = "- {key: key-of-acme, tenant: acme, quota: 1MiB, weight: 2}\n- {key: key-of-boss, tenant: boss, admin: true}\n"
MODELS = "/v1/models"


def status(url: str, key: str) -> int:
    return httpx.get(url + MODELS, headers={"Authorization": f"Bearer {key}"}).status_code


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return path


@pytest.fixture
def server(keys: Path) -> Iterator[RunningServer]:
    with RunningServer(keys_file=keys, max_queue=5) as running:
        yield running


def reload(server: RunningServer, **changes: Any) -> Any:
    new = ServerSettings(**{**server.settings.model_dump(), **changes})
    return server.call(server.services.reload, new)


def test_keys_quotas_and_weights_are_those_of_the_file_now(server: RunningServer, keys: Path) -> None:
    assert (status(server.url, "key-of-acme"), status(server.url, "key-of-bolt")) == (200, 401)
    keys.write_text("- {key: key-of-bolt, tenant: bolt, quota: 2MiB, weight: 3}\n- {key: key-of-boss, tenant: boss}\n")
    assert reload(server) == ((), ())
    assert (status(server.url, "key-of-acme"), status(server.url, "key-of-bolt")) == (401, 200)
    usages = {name: server.llm.engine.kv_cache.tenant_usage(name).quota_bytes for name in ("acme", "bolt", "boss")}
    assert usages == {"acme": None, "bolt": 2 * 2**20, "boss": None}
    assert server.llm.engine.scheduler.shares.load("bolt", 3.0) == 1.0
    boss = {"Authorization": "Bearer key-of-boss"}
    assert httpx.get(server.url + "/metrics", headers=boss).status_code == 403, "it is no admin any more"


def test_limits_change_and_other_settings_are_named(server: RunningServer) -> None:
    changes = {"max_queue": 0, "max_documents": 1, "document_ttl": 60.0, "port": 1, "max_num_seqs": 9}
    assert reload(server, **changes) == (("document_ttl", "max_documents", "max_queue"), ("max_num_seqs", "port"))
    services = server.services
    assert services.admission.max_queue == 0 and services.settings.port == server.settings.port
    acme = {"Authorization": "Bearer key-of-acme"}
    stored = httpx.post(server.url + "/v1/documents", json={"text": "a"}, headers=acme).json()
    assert stored["ttl_seconds"] == 60
    assert httpx.post(server.url + "/v1/documents", json={"text": "b"}, headers=acme).status_code == 429


def test_keys_that_cannot_be_used_change_nothing(server: RunningServer, keys: Path) -> None:
    for text in ("- {key: short}", "no list", ""):
        keys.write_text(text)
        with pytest.raises(InvalidConfig):
            reload(server, max_queue=0)
        assert status(server.url, "key-of-acme") == 200 and server.services.admission.max_queue == 5
    with pytest.raises(InvalidConfig, match="all keys were removed, which needs a restart"):
        reload(server, keys_file=None)


def test_request_in_progress_goes_on_though_its_key_is_gone(server: RunningServer, keys: Path) -> None:
    body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": 60}
    acme = {"Authorization": "Bearer key-of-acme"}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=acme, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        keys.write_text("- {key: key-of-boss, tenant: boss}\n")
        reload(server)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert status(server.url, "key-of-acme") == 401


def test_sighup_reloads_keys_and_file_of_a_running_command(tmp_path: Path, keys: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"keys_file: {keys}\nmax_queue: 7\n")
    with ServeCommand("--config", str(config), "--log-format", "json") as command:
        url = command.until(r'"message": "ready (http\S+)"')[1]
        assert status(url, "key-of-acme") == 200
        keys.write_text(KEYS.replace("acme", "bolt"))
        config.write_text(f"keys_file: {keys}\nmax_queue: 8\nblock_size: 32\n")
        command.stop(signal.SIGHUP)
        command.until(r"keys and settings reloaded; changed: --max-queue")
        command.until(r"settings that need a restart: --block-size")
        assert (status(url, "key-of-acme"), status(url, "key-of-bolt")) == (401, 200)
        config.write_text("max_quue: 8\n")
        command.stop(signal.SIGHUP)
        command.until(r"settings were not reloaded, and stay as they are: .*max_quue")
        assert status(url, "key-of-bolt") == 200
        command.stop()
        assert command.wait() == 0
    assert all(json.loads(line)["message"] for line in command.log.splitlines())


def test_sighup_while_the_model_loads_does_not_end_the_server() -> None:
    with ServeCommand(is_fresh=True) as command:
        command.until("loading")
        command.stop(signal.SIGHUP)
        command.until("the model is still being loaded; send SIGHUP again")
        command.until_ready()
        assert httpx.get(command.url + MODELS).status_code == 200


def test_server_ends_when_its_terminal_is_closed() -> None:
    controller, terminal = pty.openpty()
    command = (sys.executable, "-m", "kvmosaic", "serve", "--port", "0", "--request-cache-size", "32MiB")
    code = (
        "import fcntl, os, sys, termios\n"
        f"os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, {list(command)!r})"
    )
    process = subprocess.Popen((sys.executable, "-c", code), stdin=terminal, stderr=subprocess.PIPE, text=True)
    os.close(terminal)
    assert process.stderr is not None
    log = process.stderr.readline()
    assert "loading" in log
    os.close(controller)
    wait_until(lambda: process.poll() is not None)
    process.stderr.close()
    assert process.returncode in (0, 129, -signal.SIGHUP)
