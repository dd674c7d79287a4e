"""An application whose base URL changes: nothing else is set, and its documents are reused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from support.server import ServeCommand, serving

pytestmark = pytest.mark.slow
TOWER = "The tower of Fenbury is forty metres high, and older than the town."
MILL = "The mill of Tolbury grinds oats, and belongs to the Denwick family."
BRIDGE = "The bridge over the Quinan was built of oak. It burned in 1702."


@pytest.fixture
def served(home: Path) -> Iterator[ServeCommand]:
    with serving("reader") as running:
        yield running


def ask(served: ServeCommand, text: str) -> object:
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none")
    messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": text}]
    return client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0, max_tokens=8)  # type: ignore[arg-type]


def test_an_application_needs_another_base_url_only(served: ServeCommand) -> None:
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model="reader", temperature=0, max_tokens=8)
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You answer briefly."), ("human", "<documents>{context}</documents>\nQuestion: {question}")]
    )
    each = ChatPromptTemplate.from_template("<document>{page_content}</document>")
    chain = create_stuff_documents_chain(model, prompt, document_prompt=each, document_separator="\n")
    for texts in ((TOWER, MILL, BRIDGE), (BRIDGE, TOWER, MILL)):
        context = [Document(page_content=text) for text in texts]
        assert chain.invoke({"context": context, "question": "How high is the tower?"})
    again = ask(served, "".join(f"<document>{text}</document>\n" for text in (MILL, BRIDGE, TOWER)) + "How high?")
    details = again.usage.prompt_tokens_details.model_extra  # type: ignore[attr-defined]
    assert details["composed_tokens"] >= 40


def test_documents_that_are_not_found_are_told_in_the_first_reply(served: ServeCommand) -> None:
    numbered = "\n".join(f"[{number}] {text}" for number, text in enumerate((TOWER, MILL, BRIDGE), 1))
    first = ask(served, f"Answer from these passages.\n{numbered}\n\nHow high is the tower?")
    (told,) = first.kvmosaic["advice"]  # type: ignore[attr-defined]
    assert "3 documents" in told and "find_documents='patterns'" in told


def test_another_name_of_the_model_is_answered_with_a_warning(served: ServeCommand) -> None:
    reply = ask(served, "Hello.")
    assert any("gpt-4o" in each for each in reply.kvmosaic["warnings"])  # type: ignore[attr-defined]
