"""What a request says of its documents: what they see, where they are, through Python and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from support.asking import chat, refused
from support.engines import build_engine
from support.families import build
from support.loaded import chatting_llama
from support.server import RunningServer

from kvmosaic import LLM, SamplingParams
from kvmosaic.errors import InvalidDocument, InvalidSees
from kvmosaic.layout import arrange, dense
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Document, Prompt

TEXTS = ("The tower of Fenbury is high.", "It was built in 1642, by the town.", "The mill grinds oats.")
ASKED = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "When was it built?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def documents(**second: Any) -> list[dict[str, Any]]:
    ids = ("tower", "built", "mill")
    made: list[dict[str, Any]] = [{"id": each, "text": text} for each, text in zip(ids, TEXTS, strict=True)]
    made[1] |= second
    return made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("reader")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("sees", [["tower"], [0]])
def test_a_document_that_sees_another_is_a_hit_beside_it_only(llm: LLM, sees: list[str | int]) -> None:
    seeing = documents(sees=sees)
    salt = str(sees)
    first, again, alone = (
        llm.chat(ASKED, GREEDY, documents=given, salt=salt)[0] for given in (seeing, seeing, documents())
    )
    reused = [segment.reused_tokens > 0 for segment in alone.reuse.segments if segment.kind == "chunk"]
    assert reused == [True, False, True]
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_what_a_document_sees_is_in_the_mask() -> None:
    prompt = Prompt.from_documents(documents(sees=["tower"]), "When?", system="Answer.")
    assert [segment.sees for segment in prompt.chunks] == [(), (0,), ()]
    model = LoadedModel.from_module(build("llama", torch.float64))
    engine = build_engine(model)
    chunks = [[20, 21, 22], [30, 31], [40, 41, 42]]
    tokens = Prompt.from_tokens([2, 3], chunks, [9])
    segments = tuple(
        given if given.kind != "chunk" else type(given)(given.kind, given.token_ids, sees=said.sees)
        for given, said in zip(tokens.segments, prompt.segments, strict=True)
    )
    mask = dense(arrange(Prompt(segments), "shared")).mask
    assert mask[5, 2:5].all() and not mask[7, 2:7].any()
    engine.check_invariants()


def test_sees_over_http(http: httpx.Client) -> None:
    for given, expected in ((documents(sees=["tower"]), "computed"), (documents(sees=["tower"]), "reused")):
        reply = chat(http, messages=ASKED, documents=given, cache_salt="sees")
        assert reply["kvmosaic"]["documents"][1]["action"] == expected
    reply = chat(http, messages=ASKED, documents=documents(), cache_salt="sees")
    assert [each["action"] for each in reply["kvmosaic"]["documents"]] == ["reused", "computed", "reused"]


def test_offsets_over_http(http: httpx.Client) -> None:
    placed = [{**each, "position_offset": 100 * (number + 1)} for number, each in enumerate(documents())]
    for expected in ("computed", "reused"):
        reply = chat(http, messages=ASKED, documents=placed, position_strategy="absolute", cache_salt="offsets")
        assert [each["action"] for each in reply["kvmosaic"]["documents"]] == [expected] * 3
        assert "composed (absolute)" in reply["kvmosaic"]["composition"]


def test_stored_documents_take_both(http: httpx.Client) -> None:
    for name, text in zip(("stored-tower", "stored-built"), TEXTS, strict=False):
        assert http.put(f"/v1/documents/{name}", json={"text": text}).status_code in (200, 201)
    given = [{"id": "stored-tower"}, {"id": "stored-built", "sees": ["stored-tower"]}]
    for expected in ("computed", "reused"):
        reply = chat(http, messages=ASKED, documents=given, cache_salt="stored sees")
        assert [each["action"] for each in reply["kvmosaic"]["documents"]] == [expected] * 2
        assert [each["id"] for each in reply["kvmosaic"]["documents"]] == ["stored-tower", "stored-built"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"documents": documents(sees=["mill"])}, "'mill'"),
        ({"documents": documents(sees=[1])}, "a chunk sees only chunks before it"),
        ({"documents": documents(sees=["tower", 0])}, "names a chunk twice"),
        (
            {"documents": [{"text": f"d{n}", "sees": list(range(n))} for n in range(363)]},
            "65703 chunks in `sees`; at most",
        ),
        ({"documents": documents(), "position_strategy": "absolute"}, "position_offset"),
        ({"documents": documents(position_offset=-1)}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused(http: httpx.Client, fields: dict[str, Any], said: str) -> None:
    error = refused(http, "/v1/chat/completions", messages=ASKED, **fields)
    assert error["status"] == 400 and said in error["message"], error


def test_python_errors_name_the_value() -> None:
    with pytest.raises(InvalidDocument, match="sees is a list of ids or indexes"):
        Document("tower", sees="tower")  # type: ignore[arg-type]
    with pytest.raises(InvalidDocument, match="position_offset must be a whole number"):
        Document("tower", position_offset=-1)
    with pytest.raises(InvalidSees, match="lists 'far'"):
        LLM(chatting_llama()).compose(ASKED, documents=documents(sees=["far"]))


def test_python_says_preamble_and_patterns_per_call(llm: LLM) -> None:
    text = "The tower of Fenbury is forty metres high, and older than the town."
    for number, name in enumerate(("Ada", "Bob")):
        said = [{"role": "system", "content": f"Answer. You talk to {name}."}, ASKED[1]]
        (output,) = llm.chat(said, GREEDY, documents=[text], preamble="before:You talk", salt="call")
        assert [each.reused_tokens > 0 for each in output.reuse.segments if each.kind == "chunk"] == [bool(number)]
        pasted = [{"role": "user", "content": f"<context>\n<source id='1'>{text}</source>\n</context>\n{name}?"}]
        pasted[0]["content"] = pasted[0]["content"].replace("'", '"')
        *_, last = llm.stream(pasted, GREEDY, find_documents="open-webui", salt="call")
        assert [each.reused_tokens > 0 for each in last.reuse.segments if each.kind == "chunk"] == [bool(number)]


def test_documents_are_warmed_for_a_preamble(llm: LLM) -> None:
    text = "The mill of Tolbury grinds oats, and belongs to the Denwick family."
    llm.warm([text], system="Answer. You talk to Ada.", preamble="before:You talk", salt="warmed")
    said = [{"role": "system", "content": "Answer. You talk to Bob."}, ASKED[1]]
    (output,) = llm.chat(said, GREEDY, documents=[text], preamble="before:You talk", salt="warmed")
    assert all(each.reused_tokens for each in output.reuse.segments if each.kind == "chunk")


def test_documents_are_warmed_for_prompts_that_paste_them(llm: LLM) -> None:
    texts = [f"House {number} of Fenbury has {number} doors and no window at all." for number in range(300)]
    llm.warm(texts, find_documents="patterns", salt="pasted")
    pasted = "".join(f"<document>{text}</document>\n" for text in texts[-2:]) + "Which house has more doors?"
    params = replace(GREEDY, repair="none")  # they are alike, and would be read in full
    (output,) = llm.chat([{"role": "user", "content": pasted}], params, find_documents="document-tags", salt="pasted")
    chunks = [each for each in output.reuse.segments if each.kind == "chunk"]
    assert len(chunks) == 2 and all(each.reused_tokens == each.num_tokens for each in chunks)
