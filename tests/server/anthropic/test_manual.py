"""The manual of /v1/messages: its examples run, and every field is in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.server import RunningServer

from kvmosaic.server.anthropic import blocks, messages
from kvmosaic.server.anthropic.request import CountRequest, MessagesRequest

PAGE = (Path(__file__).parents[3] / "docs" / "server" / "anthropic.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
NAMED = set(re.findall(r"[`\"]([a-z_]+)[`\":.]", PAGE))


def here(text: str, server: RunningServer) -> str:
    assert "http://localhost:8000" in text
    return text.replace("http://localhost:8000", server.url)


@pytest.fixture(scope="module")
def as_started() -> Iterator[RunningServer]:
    """A server with the settings that it has when none is set."""
    with RunningServer(position_strategy=None, repair=None) as running:
        yield running


def test_python_in_the_manual_runs(as_started: RunningServer, tmp_path: Path) -> None:
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(here(text, as_started) for language, text in BLOCKS if language == "python"))
    ran = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) >= 3


def test_curl_in_the_manual_runs(server: RunningServer) -> None:
    (line,) = (text for language, text in BLOCKS if language == "sh" and text.startswith("curl"))
    ran = subprocess.run(["bash", "-c", here(line, server)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert [each["name"] for each in json.loads(ran.stdout)["kvmosaic"]["documents"]] == ["ferry", "mill"]


def fields_of(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


@pytest.mark.parametrize("model", [MessagesRequest, CountRequest, blocks.DocumentBlock, blocks.TextSource])
def test_every_field_is_in_the_manual(model: type[BaseModel]) -> None:
    assert fields_of(model) - NAMED - {"type"} == set()


@pytest.mark.parametrize("model", [messages.MessagesUsage, messages.Ending])
def test_what_replies_hold_is_in_the_manual(model: type[BaseModel]) -> None:
    assert fields_of(model) - NAMED == set()


def values_of(annotation: Any) -> set[str]:
    return set(annotation.__args__)


def test_events_and_reasons_are_in_the_manual() -> None:
    events = values_of(messages.MessageEvent.model_fields["type"].annotation)
    deltas = values_of(messages.BlockDelta.model_fields["type"].annotation)
    assert (events | deltas | values_of(messages.StopReason)) - NAMED == set()


def test_links_lead_to_files() -> None:
    folder = Path(__file__).parents[3] / "docs" / "server"
    assert [link for link in re.findall(r"\]\(([^)#:\s]+)\)", PAGE) if not (folder / link).exists()] == []
