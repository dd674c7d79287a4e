"""LangChain, LlamaIndex and Haystack through their OpenAI classes."""

from __future__ import annotations

import os
import warnings

import pytest
from clients.conftest import ANSWER, DOCUMENTS, QUESTION, SYSTEM
from support.server import RunningServer

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
os.environ.setdefault("LANGSMITH_TRACING", "false")

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own warnings are not ours to fix


def test_langchain_answers_and_streams(server: RunningServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=server.model,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        extra_body={"documents": DOCUMENTS},
    )
    messages = [("system", SYSTEM), ("human", QUESTION)]
    reply = model.invoke(messages)
    assert reply.content.strip() == ANSWER
    assert reply.usage_metadata["input_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(messages)).strip() == ANSWER


def test_llama_index_answers_and_streams(server: RunningServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=server.model,
        api_base=f"{server.url}/v1",
        api_key="none",
        is_chat_model=True,
        context_window=2048,
        temperature=0,
        additional_kwargs={"extra_body": {"documents": DOCUMENTS}},
    )
    messages = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=QUESTION)]
    assert model.chat(messages).message.content.strip() == ANSWER
    assert list(model.stream_chat(messages))[-1].message.content.strip() == ANSWER


def test_haystack_answers(server: RunningServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.dataclasses import ChatMessage
        from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        model=server.model,
        api_base_url=f"{server.url}/v1",
        api_key=Secret.from_token("none"),
        generation_kwargs={"temperature": 0, "extra_body": {"documents": DOCUMENTS}},
    )
    replies = generator.run([ChatMessage.from_system(SYSTEM), ChatMessage.from_user(QUESTION)])["replies"]
    assert replies[0].text.strip() == ANSWER
