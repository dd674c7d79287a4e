"""A headless browser in front of a real server, which is empty before every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium import webdriver
from support.screen import Screen, start_browser
from support.server import RunningServer


@pytest.fixture(scope="package")
def own_server() -> Iterator[RunningServer]:
    with RunningServer(chunk_tier=["host:64MiB"]) as running:
        yield running


@pytest.fixture
def server(own_server: RunningServer) -> RunningServer:
    """Without documents and without anything cached."""
    return emptied(own_server)


@pytest.fixture(scope="module")
def server_of_module(own_server: RunningServer) -> RunningServer:
    """The same, once for all tests of a module."""
    return emptied(own_server)


def emptied(server: RunningServer) -> RunningServer:
    async def empty() -> None:
        services = server.services
        for document in services.documents.documents("default"):
            services.documents.delete("default", document.id)
        services.documents.take_superseded()
        await services.engine.call(lambda engine: engine.kv_cache.reset())

    server.call(empty)
    return server


@pytest.fixture(scope="package")
def browser() -> Iterator[webdriver.Chrome]:
    chrome = start_browser()
    yield chrome
    chrome.quit()


@pytest.fixture
def screen(browser: webdriver.Chrome) -> Iterator[Screen]:
    """A tab; in the end its console must be clean."""
    opened = Screen(browser)
    yield opened
    opened.check_clean()
