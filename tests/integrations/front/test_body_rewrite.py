"""What reaches vLLM is the prompt that our own server would compute, token by token."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.asking import DOCUMENTS, MESSAGES, QUESTION
from support.families import build
from support.nasty import nasty_texts
from support.tokenizers import CHATML, DEFAULT_SYSTEM, PLACING_TEMPLATES, make_tokenizer

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.api.documents import DocumentFields
from kvmosaic.api.errors import ApiError
from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.config import StoreConfig
from kvmosaic.documents import DocumentDraft, DocumentStore
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.server.generation.prompts import Rendering, chat_prompt, text_prompt
from kvmosaic.server.tenants import Tenant
from kvmosaic.vllm.contract import Composition, How
from kvmosaic.vllm.front.body_prompt import Renderer
from kvmosaic.vllm.front.body_rewrite import may_have_documents, rewritten
from kvmosaic.vllm.front.documents import open_documents
from kvmosaic.vllm.front.served_model import ServedModel

TENANT = Tenant("t")


def own_server(template: str | None, separator: str | None) -> Any:
    tokenizer = make_tokenizer(template)
    module = build("llama", torch.float32, vocab_size=len(tokenizer), max_position_embeddings=4096)
    llm = LLM(
        LoadedModel.from_module(module, tokenizer),
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size="1MiB", chunk_separator=separator),
        engine_config=EngineConfig(request_cache_size="4MiB"),
        self_check=False,
    )
    return SimpleNamespace(
        llm=llm, settings=SimpleNamespace(chunk_separator=separator, strict=False), documents=DocumentStore()
    )


def renderer(
    template: str | None,
    separator: str | None = None,
    find_documents: str = "none",
    long_chunks: str = "split",
    **fields: Any,
) -> Renderer:
    tokenizer, store = make_tokenizer(template), open_documents(StoreConfig(documents_dir="none"))
    model = ServedModel(tokenizer, len(tokenizer), 4096, **fields)
    store.create(DEFAULT_TENANT, DocumentDraft("A stored text, which is long enough.", "Its title"), "stored")
    settings = {"chunk_separator": separator, "find_documents": find_documents, "long_chunks": long_chunks}
    return Renderer(model, ChunkCacheConfig(**settings), store)  # type: ignore[arg-type]


def rewrite(front: Renderer, route: Any, how: How | None = None, **body: Any) -> dict[str, Any] | None:
    found = rewritten(json.dumps(body).encode(), route, lambda: front, how or How())
    return None if found is None else json.loads(found.content)


def told(front: Renderer, route: Any, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as found:
        rewrite(front, route, **body)
    return found.value


def borders(prompt: Prompt) -> tuple[list[int], dict[str, Any]]:
    system = [segment.num_tokens for segment in prompt.segments if segment.kind == "system"]
    names = [chunk.name for chunk in prompt.chunks]
    said: dict[str, Any] = {"system": sum(system), "chunks": [chunk.num_tokens for chunk in prompt.chunks]}
    said["position_strategy"], said["chunk_context"] = "sequential", "companions"
    if names[1:]:
        said["companions"] = list(map(list, prompt.companions))
    if any(names):
        said["ids"] = names
    if prompt.has_texts:  # one text, before the first document
        said["texts"] = [prompt.segments[-2 - len(names)].num_tokens, *(0 for _ in names[1:])]
    return [token for segment in prompt.segments for token in segment.token_ids or ()], said


@pytest.mark.parametrize("name", [*PLACING_TEMPLATES, "chatml", "default_system", None])
def test_a_conversation_has_the_tokens_of_our_own_server(name: str | None) -> None:
    template = {**PLACING_TEMPLATES, "chatml": CHATML, "default_system": DEFAULT_SYSTEM, None: None}[name]
    services, front = own_server(template, "##"), renderer(template, "##")
    texts = nasty_texts(visible=True).filter(lambda text: "\x00" not in text)

    @settings(max_examples=10, deadline=None)
    @given(st.lists(texts, min_size=1, max_size=3), texts, st.booleans())
    def check(documents: list[str], question: str, has_system: bool) -> None:
        messages = [*(MESSAGES[:1] if has_system else ()), {"role": "user", "content": question}]
        body = DocumentFields.model_validate({"documents": documents})
        try:
            prompt = chat_prompt(services, TENANT, body, messages, Rendering()).prompt
        except ValueError:
            assert told(front, "chat", messages=messages, documents=documents).status == 400
            return
        found = rewrite(front, "chat", messages=messages, documents=documents)
        assert found is not None
        params = found["kv_transfer_params"]
        params["kvmosaic"].pop("suggested_repair", None)
        assert (params["prompt_token_ids"], params["kvmosaic"]) == borders(prompt)
        assert found["messages"] == messages and "documents" not in found

    check()


def test_a_text_has_the_tokens_of_our_own_server() -> None:
    services, front = own_server(None, "##"), renderer(None, "##")
    for text, documents in [
        ("System. ## One. ## Two. ## What?", None),
        ("What?", ["One.", {"id": "two", "text": "Two."}]),
        ("System. ## One. ## What?", [{"title": "Zero", "text": "0"}]),
    ]:
        body = DocumentFields.model_validate({"documents": documents})
        prompt = text_prompt(services, TENANT, body, text).prompt
        for given_prompt in (text, [text]):
            found = rewrite(front, "completion", prompt=given_prompt, documents=documents, max_tokens=3)
            assert found is not None and found["max_tokens"] == 3
            assert (found["prompt"], found["kv_transfer_params"]["kvmosaic"]) == borders(prompt)


def test_marked_parts_and_parts_between_separators_are_documents() -> None:
    services, front = own_server(CHATML, "##"), renderer(CHATML, "##")
    marked = {"type": "text", "text": "A letter.", "cache_control": {"type": "ephemeral"}}
    for content in ([marked, {"type": "text", "text": QUESTION}], f"First. ## Second. ## {QUESTION}"):
        messages = [*MESSAGES[:1], {"role": "user", "content": content}]
        prompt = chat_prompt(services, TENANT, DocumentFields(), messages, Rendering()).prompt
        found = rewrite(front, "chat", messages=messages)
        assert found is not None
        params = found["kv_transfer_params"]
        assert (params["prompt_token_ids"], params["kvmosaic"]) == borders(prompt)


@pytest.mark.parametrize(
    ("system", "fields"),
    [
        ("You answer. Today is 2026-11-23.", {}),
        ("You answer. Ada asks.", {"preamble": "before:Ada"}),
        ("You answer. Ada asks.", {"preamble": 6}),
        (
            [
                {"type": "text", "text": "You.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Ada."},
            ],
            {},
        ),
    ],
)
def test_the_rest_of_a_system_text_is_a_text_of_its_own(system: Any, fields: dict[str, Any]) -> None:
    services, front = own_server(CHATML, None), renderer(CHATML)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    body = DocumentFields.model_validate({"documents": ["One.", "Two."], **fields})
    prompt = chat_prompt(services, TENANT, body, messages, Rendering()).prompt
    assert prompt.has_texts
    found = rewrite(front, "chat", messages=messages, documents=["One.", "Two."], **fields)
    assert found is not None and "preamble" not in found
    params = found["kv_transfer_params"]
    assert (params["prompt_token_ids"], params["kvmosaic"]) == borders(prompt)
    whole = rewrite(front, "chat", messages=messages, documents=["One.", "Two."], preamble="all")
    assert whole is not None and ("texts" in whole["kv_transfer_params"]["kvmosaic"]) == isinstance(system, list)


PASTED = (
    '<source id="1">The ferry goes to Oak Island every day.</source>\n'
    '<source id="2">The mill was built in 1907, and it grinds wheat.</source>\n'
)


@pytest.mark.parametrize("where", ["setting", "field"])
def test_documents_in_the_text_of_a_message_are_those_of_our_own_server(where: str) -> None:
    services = own_server(CHATML, None)
    front = renderer(CHATML, find_documents="open-webui" if where == "setting" else "none")
    fields = {} if where == "setting" else {"find_documents": "open-webui"}
    messages = [MESSAGES[0], {"role": "user", "content": PASTED + "A stored text, which is long enough. What?"}]
    body = DocumentFields.model_validate({"find_documents": "open-webui"})
    prompt = chat_prompt(services, TENANT, body, messages, Rendering()).prompt
    found = rewrite(front, "chat", messages=messages, **fields)
    assert found is not None and "find_documents" not in found
    params = found["kv_transfer_params"]
    said = params["kvmosaic"]
    assert params["prompt_token_ids"] == [token for segment in prompt.segments for token in segment.token_ids or ()]
    assert said["chunks"] == [chunk.num_tokens for chunk in prompt.chunks]
    texts = [segment.num_tokens for segment in prompt.segments if segment.kind == "text"]
    assert said["texts"] == texts and len(texts) == 2
    both = rewrite(front, "chat", messages=messages, find_documents="open-webui,stored")
    assert both is not None and len(both["kv_transfer_params"]["kvmosaic"]["chunks"]) == 3
    assert rewrite(front, "chat", messages=messages, find_documents="none") is None
    assert rewrite(front, "chat", messages=MESSAGES, find_documents="patterns") is None
    text = rewrite(front, "completion", prompt=PASTED + "What?", find_documents="open-webui")
    assert text is not None and len(text["kv_transfer_params"]["kvmosaic"]["chunks"]) == 2


def test_results_of_tools_are_those_of_our_own_server() -> None:
    services, front = own_server(CHATML, None), renderer(CHATML, find_documents="agents")
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Read both."},
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "The tower is forty metres high. " * 10},
        {"role": "tool", "tool_call_id": "c2", "content": "The mill grinds oats. " * 14},
        {"role": "user", "content": "What?"},
    ]
    body = DocumentFields.model_validate({"find_documents": "agents"})
    prompt = chat_prompt(services, TENANT, body, messages, Rendering()).prompt
    found = rewrite(front, "chat", messages=messages)
    assert found is not None
    said = found["kv_transfer_params"]["kvmosaic"]
    assert said["chunks"] == [chunk.num_tokens for chunk in prompt.chunks] and len(said["chunks"]) == 2
    assert said["place"] == prompt.place > 0


def test_documents_that_were_only_found_change_no_request_that_does_not_go_with_them() -> None:
    front = renderer(CHATML, find_documents="patterns")
    assert rewrite(front, "completion", prompt=PASTED + "What?", echo=True) is None
    ids = {"kvmosaic": {"chunks": [3]}, "prompt_token_ids": [1, 2, 3, 4, 5]}
    messages = [{"role": "user", "content": PASTED + "What?"}]
    kept = rewrite(front, "chat", messages=messages, kv_transfer_params=ids)
    assert kept is not None and kept["kv_transfer_params"] == ids and kept["messages"] == messages
    assert told(front, "chat", messages=messages, find_documents="all").status == 400
    assert rewrite(front, "chat", messages=messages, chat_template_kwargs={"tokenize": True}) is None
    assert rewrite(front, "chat", messages=[{"role": "clown", "content": PASTED}]) is None


def test_a_text_prompt_has_a_preamble_too() -> None:
    front = renderer(None, "##")
    found = rewrite(front, "completion", prompt="You answer. It is 10:45. ## One. ## What?", documents=["Two."])
    assert found is not None and found["kv_transfer_params"]["kvmosaic"]["texts"][0] > 0


def test_a_response_is_the_conversation_with_its_instructions() -> None:
    front = renderer(CHATML)
    chat = rewrite(front, "chat", messages=MESSAGES, documents=DOCUMENTS)
    parts = [{"type": "input_text", "text": QUESTION}]
    for asked in (QUESTION, [{"role": "user", "content": QUESTION}], [{"role": "user", "content": parts}]):
        instructions = MESSAGES[0]["content"]
        found = rewrite(front, "response", input=asked, instructions=instructions, documents=DOCUMENTS)
        assert chat is not None and found is not None
        assert found["kv_transfer_params"] == chat["kv_transfer_params"] and found["input"] == asked
    error = told(front, "response", input="x", previous_response_id="r", documents=DOCUMENTS)
    assert error.status == 400 and "list of messages" in str(error)


def test_a_stored_document_is_named_by_its_id() -> None:
    front = renderer(CHATML)
    found = rewrite(front, "chat", messages=MESSAGES, documents=[{"id": "stored"}])
    whole = [{"id": "stored", "title": "Its title", "text": "A stored text, which is long enough."}]
    said = found["kv_transfer_params"]["kvmosaic"]
    assert (said.pop("labels"), said.pop("changes")) == (["stored [stored 1]"], [1])
    assert found == rewrite(front, "chat", messages=MESSAGES, documents=whole)
    error = told(front, "chat", messages=MESSAGES, documents=[{"id": "other"}])
    assert (error.status, error.code) == (404, "document_not_found")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES},
        {"messages": MESSAGES, "documents": []},
        {"messages": MESSAGES, "documents": None},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": "none"},
        {},
        [1],
    ],
)
def test_what_has_no_documents_is_left_to_vllm(body: Any) -> None:
    assert rewritten(json.dumps(body).encode(), "chat", lambda: renderer(CHATML, "##"), How()) is None


def test_what_is_no_json_is_left_to_vllm() -> None:
    assert rewritten(b'{"documents": [', "chat", lambda: renderer(CHATML), How()) is None


def test_the_choices_of_a_request_are_those_of_the_contract() -> None:
    front, how = renderer(CHATML), How("shared", "none", 4)
    ask = {"messages": MESSAGES, "documents": DOCUMENTS}
    found = rewrite(front, "chat", how, **ask)
    assert found is not None
    params = found["kv_transfer_params"]
    composition = Composition.from_params(params, len(params["prompt_token_ids"]))
    assert composition is not None
    assert (composition.position_strategy, composition.chunk_context, composition.repair) == ("shared", "none", 4)
    assert composition.ids == ("ferry", "mill", "zoo")
    for repair, number in (("none", 0), ("first(16)", 16), (" first( 3 ) ", 3)):
        other = rewrite(
            front, "chat", how, **ask, repair=repair, position_strategy="sequential", chunk_context="system"
        )
        assert other is not None and set(other) == {"messages", "kv_transfer_params"}
        said = other["kv_transfer_params"]["kvmosaic"]
        assert said["repair"] == number and said["position_strategy"] == "sequential" and "chunk_context" not in said


def test_names_of_documents_that_are_alike_are_repaired_where_they_have_met_others_of_their_kind() -> None:
    front = renderer(CHATML)
    invoice = "Invoice {}: customer {}, the whole amount was paid by card on the day after it was due. Contact: Ms. {}."
    records = [invoice.format(20881, "Halden", "Roth"), invoice.format(20882, "Harden", "Blake")]
    ask: dict[str, Any] = {"messages": MESSAGES, "documents": records}
    kin = {"companions": [invoice.format(20717, "Walton", "Vega")]}
    for fields in ({}, {**kin, "repair": "none"}, {"companions": ["The mill was built of red bricks, and is closed."]}):
        found = rewrite(front, "chat", **ask, **fields)
        assert found is not None and not isinstance(found["kv_transfer_params"]["kvmosaic"].get("repair"), list)
    for fields in (kin, {"repair": "names"}):
        found = rewrite(front, "chat", **ask, **fields)
        assert found is not None
        params = found["kv_transfer_params"]
        said = params["kvmosaic"]
        composition = Composition.from_params(params, len(params["prompt_token_ids"]))
        assert composition is not None and composition.repair == tuple(map(tuple, said["repair"]))
        chunk = composition.layout(params["prompt_token_ids"]).chunk_token_ids[1]
        bounds = said["repair"][1]
        runs = [chunk[start:stop] for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
        words = [front.model.tokenizer.decode(run).strip(" .:,") for run in runs]
        assert [word for word in words if word in ("20882", "Harden", "Blake")] == ["20882", "Harden", "Blake"]


def test_documents_with_the_words_of_a_first_question_are_suggested_for_repair() -> None:
    front = renderer(CHATML)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "When does the zoo open?"}]
    documents = ["The ferry leaves at six.", "The mill grinds no more.", "At the zoo lives one elephant."]
    found = rewrite(front, "chat", messages=asked, documents=documents)
    assert found is not None
    params = found["kv_transfer_params"]
    runs = [[], [], [0, params["kvmosaic"]["chunks"][2]]]
    assert params["kvmosaic"]["suggested_repair"] == runs and "repair" not in params["kvmosaic"]
    composition = Composition.from_params(params, len(params["prompt_token_ids"]), default_repair=8)
    assert composition is not None
    assert composition.repair == tuple(map(tuple, runs)) and composition.leaves_repair_open, "where workers can"
    found = rewrite(front, "chat", messages=asked, documents=documents, repair="documents(3)")
    assert found is not None and found["kv_transfer_params"]["kvmosaic"]["repair"] == runs
    later = [*asked, {"role": "assistant", "content": "At nine."}, *asked]
    for fields in ({"messages": later}, {"messages": asked, "repair": "none"}):
        found = rewrite(front, "chat", documents=documents, **fields)
        assert found is not None and "suggested_repair" not in found["kv_transfer_params"]["kvmosaic"]


def test_documents_that_are_like_one_before_them_can_be_read_in_full() -> None:
    front = renderer(CHATML)
    record = "Invoice {}: customer {}, the whole amount was paid by card on the day after it was due."
    documents = [record.format(20881, "Halden"), DOCUMENTS[0], record.format(20882, "Harden")]
    found = rewrite(front, "chat", messages=MESSAGES, documents=documents, repair="alike")
    assert found is not None
    said = found["kv_transfer_params"]["kvmosaic"]
    assert said["repair"] == [[], [], [0, said["chunks"][2]]]


def test_what_is_left_to_the_engine_is_chosen_by_the_length_of_the_prompt() -> None:
    ask = {"messages": MESSAGES, "documents": DOCUMENTS}
    short, long = (rewrite(renderer(CHATML), "chat", **{**ask, "position_strategy": name}) for name in ("auto", None))
    assert short is not None and long is not None
    for found in (short, long):
        said = found["kv_transfer_params"]["kvmosaic"]
        assert said["position_strategy"] == "sequential" and "repair" not in said
    num_tokens = len(short["kv_transfer_params"]["prompt_token_ids"])
    for trained, strategy in ((num_tokens + 1, "sequential"), (num_tokens, "shared")):
        config = SimpleNamespace(hf_text_config=SimpleNamespace(max_position_embeddings=trained))
        found = rewrite(renderer(CHATML, config=config), "chat", **ask)
        assert found is not None
        assert found["kv_transfer_params"]["kvmosaic"]["position_strategy"] == strategy


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"position_strategy": "absolute"}, "'sequential' or 'shared'"),
        ({"position_strategy": 3}, "'sequential' or 'shared'"),
        ({"chunk_context": ["system"]}, "'system', 'companions' or 'none'"),
        ({"repair": "last(3)"}, r"first\(16\)"),
        ({"repair": 16}, "none"),
        ({"repair": "first(5000)"}, "4096"),
        ({"repair": {"first": 16}}, "4096"),
        ({"repair": "first(99999999999999999999)"}, "4096"),
        ({"documents": "x"}, "documents: must be a valid list"),
        ({"documents": ["x"] * 4097}, "at most 4096"),
        ({"documents": [3]}, "documents.0: must be a JSON object"),
        ({"documents": ["x", {"txt": "y"}]}, "unknown field 'documents.1.txt'"),
        ({"documents": ["x", {"title": "y"}]}, "neither a text nor the id"),
        ({"documents": ["x", {"title": "y"}]}, "document number 2"),
        ({"echo": True}, "does not go with documents"),
        ({"truncate_prompt_tokens": 5}, "does not go with documents"),
        ({"chat_template": "{{ messages }}"}, "trust-request-chat-template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "cannot set 'tokenize'"),
        ({"chat_template_kwargs": {"preamble": "all"}}, "cannot set 'preamble'"),
        ({"chat_template_kwargs": 3}, "send an object"),
        ({"preamble": "pattern:a*b"}, "set by the operator"),
        ({"preamble": "sometimes"}, "choose 'auto', 'all'"),
        ({"kv_transfer_params": {"kvmosaic": {}}}, "send one of them"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "send one of them"),
        ({"kv_transfer_params": [1]}, "send an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text parts"),
        ({"messages": 3}, "list of messages"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "choose one of"),
    ],
)
def test_a_request_that_cannot_be_used_says_why(fields: dict[str, Any], words: str) -> None:
    error = told(renderer(CHATML), "chat", **{"messages": MESSAGES, "documents": ["x"], **fields})
    assert error.status == 400
    with pytest.raises(ApiError, match=words):
        raise error
    assert set(error.body["error"]) == {"message", "type", "param", "code"}


def test_the_document_that_is_to_blame_is_named() -> None:
    error = told(renderer(CHATML), "chat", messages=MESSAGES, documents=["x", {"title": "y"}])
    assert error.param == "documents.1"
    far_too_long = ["", {"id": "y", "text": "word " * 20_000}]
    whole = renderer(CHATML, long_chunks="error")
    assert told(whole, "chat", messages=MESSAGES, documents=far_too_long).param == "documents.1"


@pytest.mark.parametrize("prompt", [["one", "two"], [1, 2, 3], [[1, 2]], 3, None, []])
def test_documents_go_with_one_prompt_of_text(prompt: Any) -> None:
    error = told(renderer(CHATML), "completion", prompt=prompt, documents=["x"])
    assert "one prompt of text" in str(error)


def test_params_of_others_stay() -> None:
    params = {"remote_host": "x"}
    found = rewrite(renderer(CHATML), "chat", messages=MESSAGES, documents=["x"], kv_transfer_params=params)
    assert found is not None and found["kv_transfer_params"]["remote_host"] == "x"


def test_variables_of_the_template_are_those_of_vllm_and_of_the_request() -> None:
    template = CHATML + "{% if loud %}!{% endif %}{{ enable_thinking }}{{ reasoning_effort }}{{ mood }}"
    front = renderer(template, template_variables={"mood": "sad"})

    def text(**fields: Any) -> str:
        found = rewrite(front, "chat", messages=MESSAGES, documents=["x"], **fields)
        assert found is not None
        return str(front.model.tokenizer.decode(found["kv_transfer_params"]["prompt_token_ids"]))

    assert text().endswith("assistant\nsad")
    assert text(chat_template_kwargs={"loud": True, "mood": "good"}).endswith("assistant\n!good")
    assert text(reasoning_effort="none").endswith("Falsenonesad")
    assert not text(add_generation_prompt=False).endswith("assistant\nsad")


def test_efforts_are_those_of_the_servers_map() -> None:
    template = CHATML + "{{ reasoning_effort }}{{ enable_thinking }}"
    front = renderer(template, template_variables={"enable_thinking": False}, efforts={"low": "none", "high": "max"})

    def text(route: Any, **body: Any) -> str:
        found = rewrite(front, route, documents=["x"], **body)
        assert found is not None
        return str(front.model.tokenizer.decode(found["kv_transfer_params"]["prompt_token_ids"]))

    for effort, ending in [("low", "noneFalse"), ("high", "maxTrue"), ("medium", "mediumTrue")]:
        assert text("chat", messages=MESSAGES, reasoning_effort=effort).endswith(ending)
        assert text("response", input="Where?", reasoning={"effort": effort}).endswith(ending)
    assert text("chat", messages=MESSAGES).endswith("False")
    own = {"enable_thinking": True}
    assert text("chat", messages=MESSAGES, reasoning_effort="low", chat_template_kwargs=own).endswith("noneTrue")


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": [1]}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]
    front = renderer(DEFAULT_SYSTEM)
    found = rewrite(front, "chat", messages=messages, documents=["x"])
    assert found is not None and found["messages"] == messages
    text = front.model.tokenizer.decode(found["kv_transfer_params"]["prompt_token_ids"])
    assert '"arguments": {"a": [1]}' in text


def test_an_older_vllm_that_sorts_out_thoughts_composes_completions_only() -> None:
    front = renderer(CHATML, takes_chat_tokens=False, reasons=True)
    assert told(front, "chat", messages=MESSAGES, documents=["x"]).status == 501
    assert rewrite(front, "completion", prompt="x", documents=["x"]) is not None


def test_only_bodies_that_may_have_documents_are_read() -> None:
    assert not may_have_documents(b'{"messages": [{"content": "a ## b"}]}', ChunkCacheConfig())
    assert may_have_documents(b'{"messages": [{"content": "a ## b"}]}', ChunkCacheConfig(chunk_separator="##"))
    assert may_have_documents(json.dumps({"prompt": 'a "—" b'}).encode(), ChunkCacheConfig(chunk_separator='"—"'))
    assert may_have_documents(b'{"d\\u006fcuments": ["x"]}', ChunkCacheConfig())
    assert may_have_documents(b'{"documents": ["x"]}', ChunkCacheConfig())
    assert may_have_documents('{"documents": ["x"]}'.encode("utf-16"), ChunkCacheConfig())
    assert may_have_documents(b'{"cache_control": {}}', ChunkCacheConfig())


BORDERS = {"system": 2, "chunks": [3, 1]}


def own_borders(route: str, tokens: Any, borders: Any) -> bytes:
    if route == "completion":
        return json.dumps({"prompt": tokens, "kv_transfer_params": {"kvmosaic": borders}}).encode()
    params = {"prompt_token_ids": tokens, "kvmosaic": borders}
    return json.dumps({"messages": [{"role": "user", "content": "?"}], "kv_transfer_params": params}).encode()


@pytest.mark.parametrize("route", ["completion", "chat"])
def test_borders_of_a_sender_are_checked_and_passed_on_as_they_are(route: Any) -> None:
    content = own_borders(route, [1, 15, 9, 33, 21, 8, 40, 5], BORDERS)
    assert may_have_documents(content, ChunkCacheConfig())
    ready = rewritten(content, route, lambda: renderer(CHATML), How())
    assert ready is not None and ready.content == content


@pytest.mark.parametrize("route", ["completion", "chat"])
@pytest.mark.parametrize(
    ("tokens", "borders", "message"),
    [
        ([1, 15, 9, 33, 21, 8], {"system": 2, "chunks": [3, 10]}, "15 of 6 tokens"),
        ([1, 15, 9], {"system": -2, "chunks": [1]}, "-2 tokens"),
        ([1, 15, 9], {"system": 1, "chunks": [1], "repiar": 3}, "no field 'repiar'"),
        ([1, 15, 9], 5, "give an object"),
        ("a text", BORDERS, "counts token ids"),
        ([1, 2, 3, 4, 5], {"chunks": [3], "pins": [1]}, "pins is set by the server.*POST /v1/documents/ID:pin"),
        ([1, 2, 3, 4, 5], {"chunks": [3], "labels": ["a [stored 1]"]}, "labels is set by the server"),
        ([1, 2, 3, 4, 5], {"chunks": [3], "changes": [9]}, "changes is set by the server"),
    ],
)
def test_borders_that_cannot_be_right_are_refused(route: Any, tokens: Any, borders: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        rewritten(own_borders(route, tokens, borders), route, lambda: renderer(CHATML), How())
    assert caught.value.status == 400


def test_without_the_connector_documents_are_refused_instead_of_read_another_way() -> None:
    body = json.dumps({"messages": MESSAGES, "documents": DOCUMENTS}).encode()
    with pytest.raises(ApiError, match="kv-transfer-config") as caught:
        rewritten(body, "chat", lambda: renderer(CHATML, has_connector=False), How())
    assert caught.value.status == 501
