"""`vllm serve` on real weights: the answers of our own engine in every order, with speculation and shaped answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.real.prompts import DOCUMENTS, QUESTIONS, SYSTEM
from support.vllm.serving import COMPOSING, ForkedServer

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
YEAR = {
    "type": "object",
    "properties": {"year": {"type": "integer", "minimum": 1000, "maximum": 2000}},
    "required": ["year"],
}
ORDERS = (DOCUMENTS, DOCUMENTS[::-1], (*DOCUMENTS[2:], *DOCUMENTS[:2]))
FLAGS = {"first(8)": (), "none": (f"--speculative-config={json.dumps(NGRAM)}",)}
"""By repair, which is not possible beside speculation."""
COUNT = 32


@pytest.fixture(scope="module")
def servers(model_folder: Path) -> Iterator[dict[str, ForkedServer]]:
    servers = {repair: ForkedServer(model_folder, *COMPOSING, *flags) for repair, flags in FLAGS.items()}
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="module")
def own(model_folder: Path, servers: Any) -> Callable[..., str]:
    """Answers of our own engine; it is loaded after the servers, which are forks of this process."""
    from kvmosaic.model import load_model

    model = load_model(model_folder, dtype="float32", device="cpu")

    def answer(repair: str, question: str, documents: Sequence[str]) -> str:
        config = ChunkCacheConfig(chunk_cache_size="64MiB", position_strategy="sequential", repair=repair)
        engine = EngineConfig(request_cache_size="64MiB")
        with LLM(model, chunk_cache_config=config, engine_config=engine, self_check=False) as llm:
            params = SamplingParams(temperature=0, max_tokens=COUNT)
            (output,) = llm.chat(messages(question), params, documents=list(documents))
        return str(output.outputs[0].text)

    return answer


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def ask(server: ForkedServer, question: str, documents: Sequence[str], **fields: Any) -> Any:
    asked = {"model": "small", "messages": messages(question), "documents": list(documents), "temperature": 0}
    asked |= {"max_tokens": COUNT, "position_strategy": "sequential"}
    reply = server.http.post("/v1/chat/completions", json={**asked, **fields})
    assert reply.status_code == 200, reply.text
    return reply


@pytest.mark.parametrize("repair", FLAGS)
def test_answers_are_those_of_our_engine_in_every_order(servers: Any, own: Any, repair: str) -> None:
    for order in ORDERS:
        read = ask(servers[repair], QUESTIONS[0], order, repair=repair).json()
        assert read["choices"][0]["message"]["content"] == own(repair, QUESTIONS[0], order)
        assert read["kvmosaic"]["bypass"] is None
    assert read["kvmosaic"]["totals"]["moved_tokens"] > 0


@pytest.mark.parametrize("repair", FLAGS)
def test_streams_and_shaped_answers_have_their_reports(servers: Any, repair: str) -> None:
    for order in ORDERS:
        events = ask(servers[repair], QUESTIONS[0], order, stream=True, stop=["."]).text.split("\n\n")
        assert len(json.loads(events[-3].removeprefix("data: "))["kvmosaic"]["documents"]) == len(order), events[-3]
        read = ask(servers[repair], QUESTIONS[1], order, structured_outputs={"json": YEAR}).json()
        year = json.loads(read["choices"][0]["message"]["content"])["year"]
        assert 1000 <= year <= 2000 and read["kvmosaic"]["bypass"] is None
