"""Applications that paste documents into a message, unchanged but for their base URL: documents are reused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from support.server import RunningServer

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
os.environ.setdefault("LANGSMITH_TRACING", "false")

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own warnings are not ours to fix

TEXTS = [
    "Marla Denwick works as a baker. She lives in Tolbury, next to the church of Saint Anne.",
    "Jonas Kelberg works as a teacher. He lives in Halport.\n\nHe has taught there for more than thirty years.",
    "The Silver Heron was built in 1874. Its cargo is timber, and its harbour is Halport.",
    "Fenbury was founded in 1642. It lies on the river Quinan, and is known for its tower.",
]
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 1)]
QUESTIONS = ["Where does Jonas Kelberg live?", "When was Fenbury founded?", "What is the cargo of the Silver Heron?"]


@pytest.fixture(scope="module")
def finding() -> Iterator[RunningServer]:
    with RunningServer(find_documents="patterns") as running:
        yield running


class Recorder:
    """An HTTP client that keeps the report of every reply."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.others: list[Any] = []
        self.hooks = {"response": [self._keep]}
        self.client = httpx.Client(trust_env=False, timeout=60, event_hooks=self.hooks)

    def close(self) -> None:
        for client in (self.client, *self.others):
            client.close()

    def _keep(self, response: httpx.Response) -> None:
        response.read()
        assert response.status_code == 200, response.text
        self.reports.append(response.json()["kvmosaic"])


Ask = Callable[[list[str], str], Any]


def langchain(url: str, model: str, recorder: Recorder, *, is_chat: bool = True) -> Ask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_classic.chains.question_answering import load_qa_chain
        from langchain_core.documents import Document
        from langchain_openai import ChatOpenAI, OpenAI

    kind = ChatOpenAI if is_chat else OpenAI
    llm = kind(model=model, base_url=url, api_key="none", max_tokens=4, http_client=recorder.client)
    chain = load_qa_chain(llm, chain_type="stuff")
    return lambda texts, question: chain.invoke(
        {"input_documents": [Document(page_content=text) for text in texts], "question": question}
    )


def langchain_completions(url: str, model: str, recorder: Recorder) -> Ask:
    return langchain(url, model, recorder, is_chat=False)


RAG_PROMPT = """You are an assistant for question-answering tasks. Use the following pieces of retrieved context to \
answer the question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep \
the answer concise.
Question: {input}\x20
Context: {context}\x20
Answer:"""
"""`rlm/rag-prompt` of LangChain's hub."""
RETRIEVAL_QA_CHAT = "Answer any use questions based solely on the context below:\n\n<context>\n{context}\n</context>"
"""The system text of `langchain-ai/retrieval-qa-chat`."""


def _stuffed(url: str, model: str, recorder: Recorder, messages: list[tuple[str, str]]) -> Ask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_classic.chains.combine_documents import create_stuff_documents_chain
        from langchain_core.documents import Document
        from langchain_core.prompts import ChatPromptTemplate
        from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model=model, base_url=url, api_key="none", max_tokens=4, http_client=recorder.client)
    chain = create_stuff_documents_chain(llm, ChatPromptTemplate.from_messages(messages))
    return lambda texts, question: chain.invoke(
        {"context": [Document(page_content=text) for text in texts], "input": question}
    )


def langchain_rag_prompt(url: str, model: str, recorder: Recorder) -> Ask:
    return _stuffed(url, model, recorder, [("human", RAG_PROMPT)])


def langchain_retrieval_qa_chat(url: str, model: str, recorder: Recorder) -> Ask:
    return _stuffed(url, model, recorder, [("system", RETRIEVAL_QA_CHAT), ("human", "{input}")])


def llama_index(url: str, model: str, recorder: Recorder) -> Ask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from llama_index.core.response_synthesizers import get_response_synthesizer
        from llama_index.core.schema import NodeWithScore, TextNode
        from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        context_window=2048,
        max_tokens=4,
        http_client=recorder.client,
    )
    synthesizer = get_response_synthesizer(llm=llm)
    return lambda texts, question: synthesizer.synthesize(
        question, [NodeWithScore(node=TextNode(text=text)) for text in texts]
    )


def haystack(url: str, model: str, recorder: Recorder) -> Ask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from haystack import Document
        from haystack.components.builders import ChatPromptBuilder
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.dataclasses import ChatMessage
        from haystack.utils import Secret

    written = """
        Given these documents, answer the question.
        Documents:
        {% for doc in documents %}
            {{ doc.content }}
        {% endfor %}

        Question: {{query}}
        Answer:
        """
    builder = ChatPromptBuilder(template=[ChatMessage.from_user(written)], required_variables="*")
    generator = OpenAIChatGenerator(
        model=model,
        api_base_url=url,
        api_key=Secret.from_token("none"),
        generation_kwargs={"max_tokens": 4},
        http_client_kwargs={"trust_env": False, "event_hooks": recorder.hooks},
    )
    generator.warm_up()
    recorder.others.append(generator.client)
    return lambda texts, question: generator.run(
        builder.run(documents=[Document(content=text) for text in texts], query=question)["prompt"]
    )


def open_webui(url: str, model: str, recorder: Recorder) -> Ask:
    """What Open WebUI sends: its default template as the last user message, a source in tags on each line.

    The package itself (some 5 GB installed) is not run here.
    """

    def ask(texts: list[str], question: str) -> None:
        sources = "\n".join(
            f'<source id="{number}" name="file-{number}.pdf">{text}</source>' for number, text in enumerate(texts, 1)
        )
        said = (
            f"### Task:\nRespond to the user query using the provided context.\n\n<context>\n{sources}\n</context>\n\n"
        )
        body = {"model": model, "messages": [{"role": "user", "content": said + question}], "max_tokens": 4}
        recorder.client.post(f"{url}/chat/completions", json=body)

    return ask


CLIENTS = [
    langchain,
    langchain_completions,
    langchain_rag_prompt,
    langchain_retrieval_qa_chat,
    llama_index,
    haystack,
    open_webui,
]


@pytest.mark.parametrize("client", CLIENTS, ids=[client.__name__ for client in CLIENTS])
def test_documents_in_a_new_order_are_reused(
    finding: RunningServer, client: Callable[[str, str, Recorder], Ask]
) -> None:
    with closing(Recorder()) as recorder:
        ask = client(f"{finding.url}/v1", finding.model, recorder)
        for order, question in zip(ORDERS, QUESTIONS, strict=True):
            ask([TEXTS[index] for index in order], question)
    assert len(recorder.reports) == len(ORDERS)
    first, *later = [report["documents"] for report in recorder.reports]
    assert sum(each["tokens"] for each in first) > 60, recorder.reports[0]
    for documents, order in zip(later, ORDERS[1:], strict=True):
        tokens = sum(each["tokens"] for each in documents)
        reused = sum(each["reused_tokens"] for each in documents)
        print(f"{client.__name__}: {reused} of {tokens} tokens of {len(order)} documents reused")
        assert tokens >= 0.9 * sum(len(TEXTS[index].split()) for index in order)
        assert reused >= 0.9 * tokens
