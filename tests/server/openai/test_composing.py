from __future__ import annotations

from itertools import count

import httpx
import pytest
from support.asking import DOCUMENTS, GREEDY, MESSAGES, QUESTION, chat, post, refused, streamed_chat
from support.server import RunningServer

SALTS = count()


@pytest.fixture
def salt():
    """A corner of the cache that no other test has used."""
    return f"composing-{next(SALTS)}"


def details(reply):
    return reply["usage"]["prompt_tokens_details"]


def actions(reply):
    return [document["action"] for document in reply["kvmosaic"]["documents"]]


def test_documents_are_reused_in_any_order(http, salt):
    cold = chat(http, documents=DOCUMENTS, cache_salt=salt)
    warm = chat(http, documents=DOCUMENTS[::-1], cache_salt=salt)
    assert actions(cold) == ["computed"] * 3 and actions(warm) == ["reused"] * 3
    assert [document["id"] for document in warm["kvmosaic"]["documents"]] == ["zoo", "mill", "ferry"]
    assert [document["tier"] for document in cold["kvmosaic"]["documents"]] == [None] * 3
    assert [document["tier"] for document in warm["kvmosaic"]["documents"]] == ["device"] * 3
    assert cold["choices"] == warm["choices"]  # in the shared strategy order cannot matter
    assert [segment["kind"] for segment in warm["kvmosaic"]["segments"]] == ["system", *["chunk"] * 3, "question"]
    assert warm["kvmosaic"]["time_to_first_token_ms"] > 0
    assert warm["kvmosaic"]["composition"].startswith("composed (shared)")


def test_moved_documents_say_how_far(http, salt):
    fields = {"cache_salt": salt, "position_strategy": "sequential"}
    chat(http, documents=DOCUMENTS, **fields)
    warm = chat(http, documents=DOCUMENTS[::-1], **fields)
    first, second, third = warm["kvmosaic"]["documents"]
    assert (first["action"], second["action"], third["action"]) == ("reused", "moved", "moved")
    assert second["distance"] == first["tokens"] and third["distance"] == first["tokens"] + second["tokens"]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_documents_that_saw_nothing_serve_under_any_system_text(http, salt, route):
    def ask(system, **fields):
        asked = {
            "/v1/chat/completions": {"messages": [{"role": "system", "content": system}, MESSAGES[-1]]},
            "/v1/completions": {"prompt": QUESTION},
            "/v1/responses": {"input": QUESTION, "instructions": system},
        }[route]
        sizes = {"max_output_tokens": 4} if route == "/v1/responses" else {"max_tokens": 4}
        return post(http, route, **asked, **sizes, temperature=0, documents=DOCUMENTS, cache_salt=salt, **fields)

    assert actions(ask("Be brief.", chunk_context="none")) == ["computed"] * 3
    context_free = ask("Be verbose.", chunk_context="none")
    assert {*actions(context_free)} <= {"reused", "moved"}
    assert "documents did not see the system prompt" in context_free["kvmosaic"]["composition"]
    seeing = ask("Be verbose.", chunk_context="system")
    if route != "/v1/completions":  # there is nothing to see in a completion but the token that begins it
        assert actions(seeing) == ["computed"] * 3
    assert "did not see" not in seeing["kvmosaic"]["composition"]
    assert ask("Be verbose.")["kvmosaic"]["composition"] == seeing["kvmosaic"]["composition"]


def test_tokens_reused_in_documents_are_cached_ones_and_split_from_an_exact_prefix(http, salt):
    cold = chat(http, documents=DOCUMENTS, cache_salt=salt)
    warm = chat(http, documents=DOCUMENTS, cache_salt=salt)
    num_documents = sum(document["tokens"] for document in cold["kvmosaic"]["documents"])
    assert details(cold) == {
        "cached_tokens": 0,
        "composed_tokens": 0,
        "recomputed_tokens": cold["usage"]["prompt_tokens"],
    }
    assert details(warm)["composed_tokens"] >= num_documents
    system = warm["kvmosaic"]["segments"][0]
    assert details(warm)["cached_tokens"] - details(warm)["composed_tokens"] == system["reused_tokens"]
    for reply in (cold, warm):
        split = details(reply)
        assert split["cached_tokens"] + split["recomputed_tokens"] == reply["usage"]["prompt_tokens"]
        assert sum(segment["tokens"] for segment in reply["kvmosaic"]["segments"]) == reply["usage"]["prompt_tokens"]


def test_exact_prefixes_are_cached(http, salt):
    messages = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": QUESTION}]
    chat(http, messages=messages, cache_salt=salt)
    warm = chat(http, messages=messages, cache_salt=salt)
    assert details(warm)["cached_tokens"] > 0 and details(warm)["composed_tokens"] == 0
    assert warm["kvmosaic"]["composition"] == "exact" and warm["kvmosaic"]["documents"] == []
    assert [segment["kind"] for segment in warm["kvmosaic"]["segments"]] == ["plain"]


def test_salts_share_nothing(http, salt):
    chat(http, documents=DOCUMENTS, cache_salt=salt)
    other = chat(http, documents=DOCUMENTS, cache_salt=f"{salt}-other")
    assert actions(other) == ["computed"] * 3 and details(other)["cached_tokens"] == 0


def test_streams_report_the_same(http, salt):
    whole = chat(http, documents=DOCUMENTS, cache_salt=salt)
    *_, last = streamed_chat(http, documents=DOCUMENTS, cache_salt=salt, stream_options={"include_usage": True})
    assert [document["id"] for document in last["kvmosaic"]["documents"]] == ["ferry", "mill", "zoo"]
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert details(last)["composed_tokens"] > 0


def test_stored_documents_are_named_by_their_ids(http, salt):
    http.put("/v1/documents/handbook", json={"text": "The ferry goes to Oak Island.", "title": "Handbook"})
    by_id = chat(http, documents=[{"id": "handbook"}, DOCUMENTS[1]], cache_salt=salt)
    by_text = chat(http, documents=[{"title": "Handbook", "text": "The ferry goes to Oak Island."}, DOCUMENTS[1]])
    assert by_id["choices"] == by_text["choices"]
    assert [document["id"] for document in by_id["kvmosaic"]["documents"]] == ["handbook", "mill"]
    error = refused(http, "/v1/chat/completions", messages=MESSAGES, documents=[{"id": "nobody"}])
    assert error["status"] == 404 and "nobody" in error["message"]


def test_documents_come_in_every_usual_shape(http, salt):
    numbered = [{"doc_id": 7, "text": "The ferry goes to Oak Island."}, "The mill grinds oats."]
    reply = chat(http, documents=numbered, cache_salt=salt)
    assert [document["name"] for document in reply["kvmosaic"]["documents"]] == ["7", None]
    many = chat(
        http, documents=["The ferry goes to Oak Island.", {"text": "The mill grinds oats.", "metadata": {"a": 1}}]
    )
    assert many["choices"] == reply["choices"]


@pytest.mark.parametrize("mark", ["cache_control", "prompt_cache_breakpoint"])
def test_marked_parts_are_documents(http, mark):
    texts = [document["text"] for document in (DOCUMENTS[0], DOCUMENTS[2])]
    parts = [{"type": "text", "text": text, mark: {"type": "ephemeral"}} for text in texts]
    messages = [MESSAGES[0], {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    marked = chat(http, messages=messages)
    plain = chat(http, documents=texts)
    assert marked["choices"] == plain["choices"]
    assert marked["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    both = chat(http, messages=messages, documents=[DOCUMENTS[1]])
    assert len(both["kvmosaic"]["documents"]) == 3


def test_separators_split_nothing_unless_configured(http):
    messages = [{"role": "user", "content": "Answer. ## The ferry goes. ## The mill grinds. ## Where?"}]
    assert chat(http, messages=messages)["kvmosaic"]["documents"] == []
    assert post(http, "/v1/completions", prompt=messages[0]["content"], max_tokens=1)["kvmosaic"]["documents"] == []


def test_separators_split_where_configured_and_never_in_documents():
    import httpx

    with RunningServer(chunk_separator="##") as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        question = f"{DOCUMENTS[0]['text']} ## {DOCUMENTS[2]['text']} ## {QUESTION}"
        with_system = chat(http, messages=[MESSAGES[0], {"role": "user", "content": question}])
        twin = chat(http, documents=[DOCUMENTS[0]["text"], DOCUMENTS[2]["text"]])
        assert with_system["choices"] == twin["choices"]
        assert with_system["usage"]["prompt_tokens"] == twin["usage"]["prompt_tokens"]
        alone = f"{MESSAGES[0]['content']} ## {question}"
        parts = [{"type": "text", "text": alone}]
        assert chat(http, messages=[{"role": "user", "content": parts}])["choices"] == twin["choices"]
        reply = post(http, "/v1/completions", prompt=alone, **GREEDY)
        assert len(reply["kvmosaic"]["documents"]) == 2
        both = post(http, "/v1/completions", prompt=alone, documents=["a ## b ## c"], **GREEDY)
        assert len(both["kvmosaic"]["documents"]) == 3
        told = post(http, "/tokenize", messages=MESSAGES, documents=["a ## b ## c ## d"])
        assert len(told["segments"]) == 3


def test_without_a_chunk_cache_documents_are_joined_and_the_reply_says_so():
    import httpx

    with RunningServer(enable_chunk_cache=False) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        reply = chat(http, documents=DOCUMENTS)
        assert "not composed" in reply["kvmosaic"]["composition"]
        assert [segment["kind"] for segment in reply["kvmosaic"]["segments"]] == ["plain"]
        again = chat(http, documents=DOCUMENTS)
        assert details(again)["cached_tokens"] > 0 and details(again)["composed_tokens"] == 0


def test_a_document_that_was_warmed_without_the_system_text_says_so(http, salt):
    post(http, "/v1/documents:warm", documents=[DOCUMENTS[0]], cache_salt=salt)
    for told in ("cached after another system text", ""):
        (document,) = chat(http, documents=[DOCUMENTS[0]], cache_salt=salt)["kvmosaic"]["documents"]
        assert document["note"] == told
        assert document["action"] == ("computed" if told else "reused")
    without = chat(http, documents=[DOCUMENTS[0]], cache_salt=salt, messages=MESSAGES[1:])
    assert actions(without) == ["reused"]


def test_a_text_that_is_the_id_of_a_stored_document_is_answered_with_a_hint(http, salt):
    http.put("/v1/documents/harbour", json={"text": "The ferry goes to Oak Island."})
    hint = 'this is a text; to use the stored document write {"id": "harbour"}'
    twin = f"same document as another one here; {hint}"
    shapes = [DOCUMENTS[1], "harbour", {"text": " harbour "}, {"title": "At sea", "text": "harbour"}, "nobody", "zoo"]
    reply = chat(http, documents=shapes, cache_salt=salt)
    assert [document["note"] for document in reply["kvmosaic"]["documents"]] == ["", hint, twin, "", "", ""]
    assert f"documents.1: {hint}" in reply["kvmosaic"]["warnings"]
    assert post(http, "/v1/completions", prompt="?", documents=["harbour"])["kvmosaic"]["documents"][0]["note"] == hint
    assert chat(http, documents=[{"id": "harbour"}])["kvmosaic"]["documents"][0]["note"] == ""


LONG = "The mill grinds oats in the yard. " * 300
FAR_TOO_LONG = LONG * 40


@pytest.mark.parametrize("text", [LONG, FAR_TOO_LONG])
def test_a_document_that_is_too_long_is_told_by_its_place(text):
    import httpx

    server = RunningServer(max_model_len=512, chunk_separator="##", long_chunks="error")
    with server, httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        for path, asked in (
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": QUESTION}),
            ("/tokenize", {"messages": MESSAGES}),
        ):
            error = refused(http, path, documents=["a", DOCUMENTS[0], text], **asked)
            assert (error["status"], error["param"]) == (400, "documents.2"), error
            assert error["message"].startswith("the document number 3 (it has no id)"), error
            assert error["message"].endswith(
                "send shorter documents, or ask the operator of the server for --long-chunks split"
            )
            error = refused(http, path, documents=[text], **asked)
            assert error["param"] == "documents.0" and "the document (it has no id)" in error["message"]
            error = refused(http, path, documents=[{"id": "b", "text": "b"}, {"id": "a", "text": text}], **asked)
            assert error["param"] == "documents.1" and "the chunk 'a'" in error["message"]
            error = refused(http, path, documents=["a", {"title": "b"}], **asked)
            assert error["param"] == "documents.1" and "document number 2 has neither a text nor" in str(error)
        marked = [{"role": "user", "content": f"system ## a ## {text} ## {QUESTION}"}]
        error = refused(http, "/v1/chat/completions", messages=marked, documents=["b"])
        assert error["param"] is None and "the document number 3 (it has no id)" in error["message"], error


def test_documents_that_exceed_the_cache_are_answered_and_the_report_says_how() -> None:
    documents = [f"The ferry number {n} leaves at noon and comes back at nine." for n in range(80)]
    with RunningServer(chunk_cache_size="1MiB") as small, httpx.Client(base_url=small.url, timeout=60) as client:
        reply = chat(client, documents=documents)
        assert reply["usage"]["completion_tokens"] > 0
        assert "chunk cache" in reply["kvmosaic"]["composition"]
        assert chat(client, documents=documents[:2])["kvmosaic"]["composition"].startswith("composed")
    options = {"chunk_cache_size": "1MiB", "oversized_prompts": "error"}
    with RunningServer(**options) as small, httpx.Client(base_url=small.url, timeout=60) as client:
        error = refused(client, "/v1/chat/completions", messages=MESSAGES, documents=documents)
        assert (error["status"], error["code"]) == (400, "chunk_cache_full")
