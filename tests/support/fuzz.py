"""Bodies that are almost right: what careless and hostile programs make of valid ones.

    fuzzer = Fuzzer(random.Random(1), SEEDS, api)      # api: the OpenAPI document, or none
    case = fuzzer.case()

A valid body is changed as a value (fields dropped, renamed, nested, given odd values by their schema), then as bytes.
The same seed gives the same cases.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

QUESTION = {"role": "user", "content": "Where does the ferry go?"}
FERRY = {"id": "ferry", "title": "The ferry", "text": "The ferry goes to Oak Island."}
MAX_BYTES = 60_000
SHAPE = {"type": "object", "properties": {"town": {"type": "string"}, "miles": {"type": "integer"}}}


@dataclass(frozen=True)
class Case:
    """One request."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


@dataclass(frozen=True)
class Seed:
    """A route and a body that it takes; `route` is its name in the OpenAPI document, if it is not `path`."""

    method: str
    path: str
    value: Any
    route: str = ""


def _asking(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 4, "temperature": 0, **fields}


SEEDS = [
    Seed(
        "POST",
        "/v1/messages",
        {
            "model": "reader",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Where does the ferry go?"}]}],
        },
    ),
    Seed("POST", "/v1/messages/count_tokens", {"model": "reader", "messages": [QUESTION]}),
    Seed("POST", "/v1/chat/completions", _asking(messages=[QUESTION], documents=[FERRY, {"id": "kept"}])),
    Seed(
        "POST",
        "/v1/chat/completions",
        _asking(
            messages=[
                {"role": "system", "content": "Answer from the documents."},
                QUESTION,
                {"role": "assistant", "content": "Oak Island."},
                {"role": "user", "content": [{"type": "text", "text": "And when?"}]},
            ],
            documents=["A plain document.", FERRY],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
            stop=["x", "yy"],
            seed=3,
            top_p=0.9,
            top_k=8,
            min_p=0.1,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            cache_salt="salt",
            position_strategy="shared",
            chunk_context="system",
            repair="first(2)",
            priority=0,
        ),
    ),
    Seed(
        "POST",
        "/v1/chat/completions",
        _asking(
            messages=[QUESTION],
            response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SHAPE}},
        ),
    ),
    Seed("POST", "/v1/chat/completions", _asking(messages=[QUESTION], structured_outputs={"regex": "[a-z]{1,9}"})),
    Seed("POST", "/v1/chat/completions", _asking(messages=[QUESTION], structured_outputs={"choice": ["yes", "no"]})),
    Seed("POST", "/v1/chat/completions", _asking(messages=[QUESTION], structured_outputs={"json": SHAPE})),
    Seed(
        "POST", "/v1/chat/completions", _asking(messages=[QUESTION], structured_outputs={"grammar": 'start: "a" | "b"'})
    ),
    Seed("POST", "/v1/completions", _asking(prompt="The ferry goes to", documents=[FERRY], echo=True)),
    Seed("POST", "/v1/completions", _asking(prompt=[[5, 6, 7], [8, 9]], n=1, logprobs=2, stop_token_ids=[3])),
    Seed("POST", "/v1/completions", _asking(prompt=["The ferry", "The mill"], stream=True, suffix=None, best_of=1)),
    Seed(
        "POST",
        "/v1/responses",
        {
            "input": "Where does the ferry go?",
            "documents": [FERRY],
            "max_output_tokens": 4,
            "instructions": "Be short.",
        },
    ),
    Seed(
        "POST",
        "/v1/responses",
        {
            "input": [
                {"type": "function_call", "call_id": "1", "name": "find", "arguments": '{"a": 1}'},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
            ],
            "tools": [{"type": "web_search"}],
            "include": ["reasoning.encrypted_content"],
            "max_output_tokens": 4,
            "stream": True,
            "text": {"format": {"type": "json_schema", "name": "place", "schema": SHAPE}},
            "metadata": {"a": "b"},
        },
    ),
    Seed("POST", "/tokenize", {"messages": [QUESTION], "documents": [FERRY]}),
    Seed("POST", "/tokenize", {"prompt": "Where does the ferry go?", "add_special_tokens": True}),
    Seed("POST", "/detokenize", {"tokens": [4, 5, 6]}),
    Seed(
        "POST",
        "/v1/documents",
        {**FERRY, "metadata": {"a": "b"}, "ttl_seconds": 60, "pinned": False, "priority": 0.5},
    ),
    Seed("POST", "/v1/documents", {"text": "The mill grinds oats."}),
    Seed(
        "PUT",
        "/v1/documents/ferry",
        {"text": "The ferry goes to Elm Island.", "title": "Ferry", "refresh_ttl_on_hit": True},
        "/v1/documents/{document_id}",
    ),
    Seed("PATCH", "/v1/documents/ferry", {"priority": 0.25}, "/v1/documents/{document_id}"),
    Seed(
        "POST",
        "/v1/documents/ferry:warm",
        {"system": "Answer.", "cache_salt": "s", "chunk_context": "none"},
        "/v1/documents/{document_id}:warm",
    ),
    Seed("POST", "/v1/documents:warm", {"ids": ["ferry", "mill"], "stream": True}),
    Seed("POST", "/v1/documents:warm", {"documents": [FERRY, {"text": "The zoo."}], "endpoint": "/v1/completions"}),
    Seed("POST", "/v1/documents/ferry:pin", {}, "/v1/documents/{document_id}:pin"),
    Seed("POST", "/v1/documents/ferry:unpin", {}, "/v1/documents/{document_id}:unpin"),
    Seed("POST", "/v1/documents:sleep", {"min_accesses": 1, "idle_seconds": 600}),
]

TEXTS = [
    "", " ", "\n", "\t\x0b", "\x00", "\ud800", "\udfff\ud800", "\u202e", "\ufeff", "\uffff", "é", "e\u0301" * 40,
    "👩\u200d👩\u200d👧", "<|im_start|>", "<s>", "</s>", "[INST]", "{{ bos_token }}", "{% for x in y %}",
    "../../etc/passwd", "%00", "%s%n", "a" * 5_000, "(" * 3_000, "\\" * 999, '"', "ferry", "ferry:warm", ".", "..",
    "1e5", "true", "none",
    "first(-1)", "first(1e99)", "query(2)", "query(0.1", "combined(query(0.1),first(3))", "start: start",
    "a{1,99999}", "(a+)+$",
]  # fmt: skip
NUMBERS: list[Any] = [
    0, -0.0, 1, -1, 2, 0.5, 1.0, 1e-320, 5e-324, 1e308, -1e308, 2**31, 2**31 - 1, -(2**31), 2**32, 2**53 + 1, 2**63,
    2**63 - 1, -(2**63), 2**64, 10**30, 10**63, float("nan"), float("inf"), float("-inf"), 1e-7, 127, 128, 256, 65_536,
]  # fmt: skip
CONTENT_TYPES = [
    "application/json; charset=utf-16", "application/JSON", "text/plain", "", "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x", "application/merge-patch+json", "application/+json",
    "application/json" + ";" * 500,
    "\xff\xfe", "application/octet-stream",
]  # fmt: skip
HEADERS = [
    ("If-Match", '"1"'), ("If-Match", "*"), ("If-Match", '"99999999999999999999999"'), ("If-Match", "W/\xe9"),
    ("Content-Encoding", "gzip"), ("X-Request-Id", "\xff" * 90), ("X-Request-Id", "a" * 9_000),
    ("Content-Length", "-5"),
    ("Origin", "null"), ("Host", "[::1"), ("Accept", "\x7f"), ("Transfer-Encoding", "chunked"),
    ("Expect", "100-continue"),
]  # fmt: skip
IDS = ["%2e%2e", "a%00b", "%ff%fe", "x" * 300, "ferry%2F..%2Fmill", "%F0%9F%98%80", "ferry:warm:warm", ":pin", "kept"]


class Fuzzer:
    """Cases without end; what is random comes from `choose` alone."""

    def __init__(self, choose: Random, seeds: Sequence[Seed] = SEEDS, api: Mapping[str, Any] | None = None) -> None:
        self.choose = choose
        self._seeds = list(seeds)
        self._api = api
        self._last = b"{}"

    def case(self) -> Case:
        """The next one."""
        choose = self.choose
        seed = choose.choice(self._seeds)
        value = copy.deepcopy(seed.value)
        schema = self._schema_of(seed)
        for _ in range(choose.choice([0, 1, 1, 1, 2, 2, 3, 8])):
            value = choose.choice(VALUE_CHANGES)(self, value, schema)
        body = written(value, choose)
        if choose.random() < 0.4:
            for _ in range(choose.choice([1, 1, 2, 5])):
                body = choose.choice(BYTE_CHANGES)(self, body)
        case = Case(seed.method, seed.path, body[:MAX_BYTES])
        self._last = case.body
        return self._with_odd_head(case) if choose.random() < 0.1 else case

    def _with_odd_head(self, case: Case) -> Case:
        choose = self.choose
        what = choose.randrange(4)
        if what == 0:
            return replace(case, headers={"Content-Type": choose.choice(CONTENT_TYPES)})
        if what == 1:
            return replace(case, headers={**case.headers, **dict([choose.choice(HEADERS)])})
        if what == 2:
            return replace(case, path=case.path.replace("ferry", choose.choice(IDS)))
        method = choose.choice(["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"])
        return replace(case, method=method, path=choose.choice(self._seeds).path)

    def _schema_of(self, seed: Seed) -> Mapping[str, Any]:
        if self._api is None:
            return {}
        operation = self._api["paths"].get(seed.route or seed.path, {}).get(seed.method.lower(), {})
        content = operation.get("requestBody", {}).get("content", {})
        schema: Mapping[str, Any] = content.get("application/json", {}).get("schema", {})
        return schema

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a schema says itself: a reference followed, one of several forms chosen."""
        for _ in range(9):
            if "$ref" in schema and self._api is not None:
                schema = self._api["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            elif forms := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
                schema = self.choose.choice(forms)
            else:
                break
        return schema

    def odd_value(self, schema: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
        """A value at the edge of what a schema allows, or one that has nothing to do with it."""
        choose = self.choose
        known = self.resolved(schema or {})
        if known and choose.random() < 0.6:
            if "enum" in known:
                return choose.choice(known["enum"])
            edges = [known[name] + step for name in ("minimum", "maximum") if name in known for step in (-1, 0, 1)]
            if edges:
                return choose.choice(edges)
            if known.get("type") == "object" and depth < 3:
                fields = list(known.get("properties", {}).items())
                chosen = choose.sample(fields, min(len(fields), choose.randrange(5)))
                return {name: self.odd_value(part, depth + 1) for name, part in chosen}
            if known.get("type") == "array" and depth < 3:
                return [self.odd_value(known.get("items"), depth + 1) for _ in range(choose.randrange(4))]
        kind = choose.randrange(7)
        if kind == 0:
            return choose.choice([None, True, False])
        if kind in (1, 2):
            return choose.choice(NUMBERS)
        if kind in (3, 4):
            return choose.choice(TEXTS)
        if kind == 5:
            return [choose.choice([*NUMBERS, *TEXTS]) for _ in range(choose.choice([0, 1, 2, 300]))]
        return {choose.choice(TEXTS): choose.choice(NUMBERS) for _ in range(choose.choice([0, 1, 20]))}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) in a value."""
    left = [value]
    while left:
        here = left.pop()
        keys = here if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        for key in keys:
            yield here, key
            left.append(here[key])


def _place(fuzzer: Fuzzer, value: Any) -> tuple[Any, Any] | None:
    found = list(places(value))
    return fuzzer.choose.choice(found) if found else None


def _odd_part(fuzzer: Fuzzer, value: Any, schema: Mapping[str, Any]) -> Any:
    if (place := _place(fuzzer, value)) is None:
        return fuzzer.odd_value()
    place[0][place[1]] = fuzzer.odd_value()
    return value


def _odd_field(fuzzer: Fuzzer, value: Any, schema: Mapping[str, Any]) -> Any:
    """Another value for a field that the route knows."""
    fields = list(fuzzer.resolved(schema).get("properties", {}).items())
    if fields and isinstance(value, dict):
        name, known = fuzzer.choose.choice(fields)
        value[name] = fuzzer.odd_value(known)
    return value


def _dropped(fuzzer: Fuzzer, value: Any, schema: Mapping[str, Any]) -> Any:
    if place := _place(fuzzer, value):
        del place[0][place[1]]
    return value


def _renamed(fuzzer: Fuzzer, value: Any, schema: Mapping[str, Any]) -> Any:
    place = _place(fuzzer, value)
    if place and isinstance(place[0], dict):
        place[0][fuzzer.choose.choice([*TEXTS, place[1] + "s", place[1].upper()])] = place[0].pop(place[1])
    return value


def _nested(fuzzer: Fuzzer, value: Any, schema: Mapping[str, Any]) -> Any:
    place = _place(fuzzer, value)
    inner = place[0][place[1]] if place else value
    for _ in range(fuzzer.choose.choice([1, 1, 3, 30, 62, 70])):
        inner = [inner] if fuzzer.choose.random() < 0.5 else {"type": "object", "properties": {"a": inner}}
    if place is None:
        return inner
    place[0][place[1]] = inner
    return value


def _repeated(fuzzer: Fuzzer, value: Any, schema: Mapping[str, Any]) -> Any:
    if place := _place(fuzzer, value):
        part = place[0][place[1]]
        times = fuzzer.choose.choice([0, 2, 9, 200])
        if isinstance(part, str):
            place[0][place[1]] = part[:200] * times
        elif isinstance(part, list) and len(json.dumps(part)) < 300:
            place[0][place[1]] = part * times
    return value


def _swapped(fuzzer: Fuzzer, value: Any, schema: Mapping[str, Any]) -> Any:
    one, other = _place(fuzzer, value), _place(fuzzer, value)
    if one and other:
        taken = copy.deepcopy(other[0][other[1]])
        one[0][one[1]] = taken
    return value


ValueChange = Callable[[Fuzzer, Any, Mapping[str, Any]], Any]
VALUE_CHANGES: list[ValueChange] = [
    _odd_part, _odd_part, _odd_field, _odd_field, _odd_field, _dropped, _renamed, _nested, _repeated, _swapped,
]  # fmt: skip


def written(value: Any, choose: Random) -> bytes:
    """A value as JSON, now and then in an unusual way."""
    text = json.dumps(value, ensure_ascii=choose.random() < 0.7, indent=choose.choice([None, None, 2]))
    how = choose.randrange(40)
    encoding = "utf-16" if how == 0 else "utf-8-sig" if how == 1 else "utf-8"
    return text.encode(encoding, "surrogatepass" if how < 20 else "replace")


def _at(fuzzer: Fuzzer, body: bytes) -> int:
    return fuzzer.choose.randrange(len(body) + 1)


def _flip(fuzzer: Fuzzer, body: bytes) -> bytes:
    at = _at(fuzzer, body)
    return body[:at] + bytes([byte ^ (1 << fuzzer.choose.randrange(8)) for byte in body[at : at + 1]]) + body[at + 1 :]


def _insert(fuzzer: Fuzzer, body: bytes) -> bytes:
    at = _at(fuzzer, body)
    return body[:at] + fuzzer.choose.randbytes(fuzzer.choose.choice([1, 1, 4, 50])) + body[at:]


TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"NaN", b"-Infinity", b"1e999", b"9" * 70, b"-", b"\\u",
    b"\\ud83d", b"\\u0000", b"//", b"'", b"\xc3", b"\xef\xbb\xbf", b"\0", b"[" * 70, b'{"a":' * 70, b"1e63", b"0x1",
]  # fmt: skip


def _token(fuzzer: Fuzzer, body: bytes) -> bytes:
    """A piece of JSON where none belongs, or one in place of another."""
    at = _at(fuzzer, body)
    return body[:at] + fuzzer.choose.choice(TOKENS) + body[at + fuzzer.choose.choice([0, 1, 4]) :]


def _cut(fuzzer: Fuzzer, body: bytes) -> bytes:
    one, other = sorted((_at(fuzzer, body), _at(fuzzer, body)))
    return body[:one] + body[other:] if fuzzer.choose.random() < 0.5 else body[:other]


def _joined(fuzzer: Fuzzer, body: bytes) -> bytes:
    """This body and another one, or this one twice."""
    other = fuzzer.choose.choice([body, fuzzer._last])
    at = _at(fuzzer, body)
    return body[:at] + other[_at(fuzzer, other) :] if fuzzer.choose.random() < 0.5 else body + other


def _doubled_key(fuzzer: Fuzzer, body: bytes) -> bytes:
    """The fields of an object once more, in front of them."""
    if body[:1] != b"{":
        return body
    other = fuzzer.choose.choice([b'"messages": [], ', b'"n": 3, ', b'"max_tokens": 2, ', b'"text": "x", ', b'"": 1, '])
    return b"{" + other * fuzzer.choose.choice([1, 2, 500]) + body[1:]


ByteChange = Callable[[Fuzzer, bytes], bytes]
BYTE_CHANGES: list[ByteChange] = [_flip, _insert, _token, _token, _cut, _joined, _doubled_key]
