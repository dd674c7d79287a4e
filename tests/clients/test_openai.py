"""The `openai` package, sync and async, with documents in the extra body."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from clients.conftest import ANSWER, DOCUMENTS, QUESTION, SYSTEM
from support.server import RunningServer

MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_answers_from_documents_in_the_extra_body(client: openai.OpenAI, server: RunningServer) -> None:
    reply = client.chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=0, extra_body={"documents": DOCUMENTS}
    )
    assert reply.choices[0].message.content.strip() == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    details = reply.usage.prompt_tokens_details
    assert details.cached_tokens + details.recomputed_tokens == reply.usage.prompt_tokens
    assert 0 <= details.composed_tokens <= details.cached_tokens


def test_documents_are_reused_in_another_order(client: openai.OpenAI, server: RunningServer) -> None:
    def ask(documents: list[dict[str, str]]) -> tuple[str, dict[str, str], Any]:
        reply = client.chat.completions.create(
            model=server.model,
            messages=MESSAGES,
            temperature=0,
            extra_body={"documents": documents, "cache_salt": "order", "position_strategy": "sequential"},
        )
        actions = {document["id"]: document["action"] for document in reply.kvmosaic["documents"]}
        return reply.choices[0].message.content.strip(), actions, reply.usage.prompt_tokens_details

    first, cold, _ = ask(DOCUMENTS)
    second, warm, cached = ask(DOCUMENTS[::-1])
    assert first == second == ANSWER
    assert set(cold.values()) == {"computed"}
    assert set(warm.values()) <= {"moved", "reused"}
    assert "moved" in warm.values()
    assert cached.cached_tokens >= 40 > cached.cached_tokens - cached.composed_tokens, (
        "an ordinary client sees the gain"
    )


def test_stream_of_a_chat_gives_the_same_text_and_usage(client: openai.OpenAI, server: RunningServer) -> None:
    chunks = list(
        client.chat.completions.create(
            model=server.model,
            messages=MESSAGES,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"documents": DOCUMENTS},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == ANSWER
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens


def test_completions_answer_over_documents(client: openai.OpenAI, server: RunningServer) -> None:
    reply = client.completions.create(
        model=server.model, prompt=QUESTION, temperature=0, max_tokens=12, extra_body={"documents": DOCUMENTS}
    )
    assert reply.choices[0].text.strip().startswith(ANSWER)


def test_responses_answer_over_documents(client: openai.OpenAI, server: RunningServer) -> None:
    reply = client.responses.create(
        model=server.model, instructions=SYSTEM, input=QUESTION, temperature=0, extra_body={"documents": DOCUMENTS}
    )
    assert reply.output_text.strip() == ANSWER
    assert reply.status == "completed"


def test_responses_stream_ends_with_the_whole_response(client: openai.OpenAI, server: RunningServer) -> None:
    with client.responses.stream(
        model=server.model, instructions=SYSTEM, input=QUESTION, temperature=0, extra_body={"documents": DOCUMENTS}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text.strip() == ANSWER == final.output_text.strip()


def test_json_schema_shapes_the_answer(client: openai.OpenAI, server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"town": {"type": "string", "enum": ["Tolbury", "Halport"]}},
        "required": ["town"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "town", "schema": schema, "strict": True}},
        extra_body={"documents": DOCUMENTS},
    )
    assert reply.choices[0].message.content in ('{"town":"Tolbury"}', '{"town":"Halport"}')
    assert reply.choices[0].finish_reason == "stop"


def test_stored_documents_are_named_by_id(client: openai.OpenAI, server: RunningServer) -> None:
    for document in DOCUMENTS:
        client.put(f"/documents/{document['id']}", body=document, cast_to=object)
    handles = [{"id": document["id"]} for document in DOCUMENTS]
    reply = client.chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=0, extra_body={"documents": handles}
    )
    assert reply.choices[0].message.content.strip() == ANSWER
    assert [document["id"] for document in reply.kvmosaic["documents"]] == ["marla", "jonas", "heron"]


def test_models_are_listed(client: openai.OpenAI, server: RunningServer) -> None:
    assert server.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(server.model).id == server.model


def test_errors_are_the_clients_own(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=server.model, messages=MESSAGES, temperature=1e9)
    with pytest.raises(openai.NotFoundError, match="never-stored"):
        client.chat.completions.create(
            model=server.model, messages=MESSAGES, extra_body={"documents": [{"id": "never-stored"}]}
        )


def test_async_clients_side_by_side_get_the_answer_of_one_alone(server: RunningServer) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            replies = await asyncio.gather(
                *[
                    client.chat.completions.create(
                        model=server.model,
                        messages=MESSAGES,
                        temperature=0,
                        extra_body={"documents": DOCUMENTS[shift:] + DOCUMENTS[:shift]},
                    )
                    for shift in (0, 1, 2, 0, 1, 2)
                ]
            )
        return [reply.choices[0].message.content.strip() for reply in replies]

    assert asyncio.run(ask_all()) == [ANSWER] * 6


def test_async_stream_can_be_left_early(server: RunningServer) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=server.model, messages=MESSAGES, stream=True, max_tokens=500, extra_body={"ignore_eos": True}
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    break
            await stream.close()

    asyncio.run(leave())
