from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.server import RunningServer

PAGE = (Path(__file__).parents[3] / "docs" / "server" / "openai.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
CURL = [text for language, text in BLOCKS if language == "sh" and text.startswith("curl")]


def here(text, server):
    assert "http://localhost:8000" in text
    return text.replace("http://localhost:8000", server.url)


@pytest.fixture(scope="module")
def as_started():
    """A server with the settings that it has when nobody sets any."""
    with RunningServer(position_strategy=None, repair=None) as running:
        yield running


def test_python_in_the_manual_runs_from_top_to_bottom(as_started, tmp_path):
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(here(text, as_started) for text in PYTHON))
    ran = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) >= 3


def test_curl_in_the_manual_runs(server):
    (line,) = CURL
    ran = subprocess.run(["bash", "-c", here(line, server)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert [each["id"] for each in json.loads(ran.stdout)["kvmosaic"]["documents"]] == ["ferry", "mill"]


def fields_of(model):
    return {field.alias or name for name, field in model.model_fields.items()}


def test_every_field_is_in_the_manual():
    from kvmosaic.server.openai.chat_request import ChatRequest
    from kvmosaic.server.openai.completions import CompletionRequest
    from kvmosaic.server.openai.response_schemas import ResponseRequest

    named = set(re.findall(r"`([a-z_]+)[`:.]", PAGE))
    fields = fields_of(ChatRequest) | fields_of(CompletionRequest) | fields_of(ResponseRequest)
    assert fields - named == set()


def test_links_lead_to_files():
    folder = Path(__file__).parents[3] / "docs" / "server"
    assert [link for link in re.findall(r"\]\(([^)#:\s]+)\)", PAGE) if not (folder / link).exists()] == []
