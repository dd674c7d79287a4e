"""The real server, started once for the tests that only read, and a clean environment for those about settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.server import RunningServer


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KVMOSAIC_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running
