from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
LINES = [line for line in re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", TEXT)).splitlines() if line.strip()]
STAGES = "\n".join(LINES).split("FROM ")[1:]


def instruction(name: str, stage: str = STAGES[-1]) -> list[str]:
    return re.findall(rf"^{name} (.*)$", stage, re.MULTILINE)


def health_check() -> list[str]:
    (line,) = instruction("HEALTHCHECK")
    command: list[str] = json.loads(line.split("CMD ", 1)[1])
    return command


class _Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" and self.server.is_ready else 503)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_only_known_instructions_are_used() -> None:
    known = {"ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "LABEL", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"}
    assert {line.split()[0] for line in LINES} <= known | {"HEALTHCHECK", "ENTRYPOINT", "CMD"}


def test_the_image_has_only_what_the_build_made() -> None:
    assert len(STAGES) == 2
    assert all(stage.startswith("python:${PYTHON}-slim") for stage in STAGES)
    assert instruction("COPY") == ["--from=build /opt/kvmosaic /opt/kvmosaic"]
    assert "pip" not in STAGES[1]


def test_every_install_reads_the_constraints() -> None:
    installs = [run for run in instruction("RUN", STAGES[0]) if "pip install" in run]
    assert len(installs) == 2
    assert all("-c constraints.txt" in install for install in installs)
    assert "'.[server,gguf,llama,tiers,postgres,otel]'" in installs[-1]


def test_what_llama_cpp_is_linked_with_is_in_the_image() -> None:
    assert any(run.startswith("apt-get update") and "libgomp1" in run for run in instruction("RUN"))


def test_what_is_copied_exists_and_is_let_into_the_build() -> None:
    let_in = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    for copy in instruction("COPY", STAGES[0]):
        for source in copy.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in let_in
    assert "*" in let_in


def test_the_server_runs_as_a_user_without_rights() -> None:
    (user,) = instruction("USER")
    assert user == "10001:10001"
    assert STAGES[-1].index("\nUSER ") < STAGES[-1].index("\nENTRYPOINT ")


def test_signals_reach_the_server_and_flags_can_be_added() -> None:
    assert [json.loads(line) for line in instruction("ENTRYPOINT")] == [["kvmosaic", "serve"]]
    assert [json.loads(line) for line in instruction("CMD")] == [["reader"]]
    assert instruction("STOPSIGNAL") == ["SIGTERM"]


def test_no_host_and_no_secret_is_written_down() -> None:
    assert not re.search(r"https?://(?!127\.0\.0\.1)", TEXT)
    assert not re.search(r"ARG \w*(KEY|TOKEN|PASSWORD)", TEXT)


@pytest.mark.parametrize(("is_ready", "code"), [(True, 0), (False, 1)])
def test_the_health_check_asks_whether_the_server_is_ready(is_ready: bool, code: int) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Ready)
    server.is_ready = is_ready  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        environment = {**os.environ, "KVMOSAIC_PORT": str(server.server_port), "http_proxy": "http://127.0.0.1:9"}
        command = [sys.executable, *health_check()[1:]]
        assert subprocess.run(command, env=environment, timeout=30, check=False).returncode == code
    finally:
        server.shutdown()
        server.server_close()


def test_the_health_check_fails_when_nobody_answers() -> None:
    command = [sys.executable, *health_check()[1:]]
    environment = {**os.environ, "KVMOSAIC_PORT": "9"}
    assert subprocess.run(command, env=environment, timeout=30, check=False, stderr=subprocess.DEVNULL).returncode
