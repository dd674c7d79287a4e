"""The real server, and three documents that every client asks about."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.server import RunningServer

DOCUMENTS = [
    {"id": "marla", "title": "Marla Denwick", "text": "Marla Denwick works as a baker. She lives in Tolbury."},
    {"id": "jonas", "title": "Jonas Kelberg", "text": "Jonas Kelberg works as a teacher. He lives in Halport."},
    {"id": "heron", "title": "Silver Heron", "text": "The Silver Heron was built in 1874. Its cargo is timber."},
]
QUESTION = "Where does Jonas Kelberg live?"
ANSWER = "Halport"
SYSTEM = "Answer the question from the documents."


@pytest.fixture(autouse=True)
def event_loop_for_llama_index() -> Iterator[None]:
    """Closed after the test: LlamaIndex takes the thread's loop, or makes one that nobody closes."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running
