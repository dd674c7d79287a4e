from __future__ import annotations

import logging

import pytest

from kvmosaic.server.process.logs import NoProbes


def line(address: str) -> logging.LogRecord:
    """A line as uvicorn's access log makes them."""
    told = ("127.0.0.1:5", "GET", address, "1.1", 200)
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', told, None)


@pytest.mark.parametrize("address", ["/livez", "/readyz", "/health", "/kv/readyz", "/readyz?verbose"])
def test_probes_are_not_logged(address: str) -> None:
    assert not NoProbes().filter(line(address))


@pytest.mark.parametrize("address", ["/v1/chat/completions", "/v1/documents/livez:warm", "/?next=/livez", "/"])
def test_what_is_no_probe_is_logged(address: str) -> None:
    assert NoProbes().filter(line(address))


def test_messages_of_another_form_are_logged() -> None:
    assert NoProbes().filter(logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "something else", None, None))
