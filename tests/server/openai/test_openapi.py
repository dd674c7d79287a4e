from __future__ import annotations

import json
import re

import pytest
from jsonschema import Draft202012Validator
from support.asking import DOCUMENTS, GREEDY, MESSAGES, QUESTION, chunks, post, refused

BODIES = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        **GREEDY,
        "documents": DOCUMENTS,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/completions": {"prompt": QUESTION, **GREEDY, "documents": DOCUMENTS, "logprobs": 2},
    "/v1/responses": {"input": QUESTION, "documents": DOCUMENTS, "max_output_tokens": 8, "top_logprobs": 2},
    "/tokenize": {"messages": MESSAGES, "documents": DOCUMENTS},
    "/detokenize": {"tokens": [4, 5]},
}
ANSWERING = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]


@pytest.fixture(scope="module")
def api(server):
    return server.app.openapi()


def validator(api, schema):
    return Draft202012Validator({**schema, "components": api["components"]})


def body_schema(api, path):
    return api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def reply_schema(api, path, status="200", method="post"):
    return api["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]


@pytest.mark.parametrize("path", BODIES)
def test_bodies_and_replies_are_what_is_declared(api, http, path):
    validator(api, body_schema(api, path)).validate(BODIES[path])
    validator(api, reply_schema(api, path)).validate(post(http, path, **BODIES[path]))
    error = {
        key: value for key, value in refused(http, path, **{**BODIES[path], "cache_sal": 1}).items() if key != "status"
    }
    for status in ("400", "default"):
        validator(api, reply_schema(api, path, status)).validate({"error": error})


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model_name}"])
def test_models_are_what_is_declared(api, http, server, path):
    reply = http.get(path.format(model_name=server.model)).json()
    validator(api, reply_schema(api, path, method="get")).validate(reply)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_are_what_their_models_declare(http, path):
    from kvmosaic.server.openai.replies import ChatChunk, Completion

    model = ChatChunk if "chat" in path else Completion
    schema = Draft202012Validator(model.model_json_schema(mode="serialization"))
    for event in chunks(http, path, **BODIES[path], stream_options={"include_usage": True}):
        schema.validate(event)


@pytest.mark.parametrize("path", ANSWERING)
def test_streams_and_errors_are_declared(api, path):
    responses = api["paths"][path]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(responses)
    assert "422" not in responses
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "data" in responses["200"]["content"]["text/event-stream"]["itemSchema"]["properties"]


@pytest.mark.parametrize("path", BODIES)
def test_examples_can_be_sent(api, http, path):
    schema = body_schema(api, path)
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema))
    examples = [example for name in names for example in api["components"]["schemas"][name]["examples"]]
    assert examples
    for example in examples:
        validator(api, schema).validate(example)
        assert post(http, path, **example)


def test_every_number_text_and_list_of_a_body_has_a_bound(api):
    bodies = {name for path in BODIES for name in _names(api, body_schema(api, path))}
    unbounded = [
        f"{name}: {where}" for name in bodies for where in _unbounded(api["components"]["schemas"][name], name)
    ]
    assert unbounded == []


def _names(api, schema):
    found: set[str] = set()
    left = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema))
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += re.findall(r'"#/components/schemas/(\w+)"', json.dumps(api["components"]["schemas"][name]))
    return found


def _unbounded(schema, where):
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _unbounded(item, f"{where}.{index}")
    if not isinstance(schema, dict):
        return
    limits = {"string": ("maxLength", "enum", "const"), "integer": ("maximum",), "number": ("maximum",)}
    limits["array"] = ("maxItems",)
    kind = schema.get("type")
    if isinstance(kind, str) and kind in limits and not any(limit in schema for limit in limits[kind]):
        yield where
    is_open = kind == "object" and schema.get("additionalProperties", False) is not False
    if is_open and "maxProperties" not in schema:
        yield where
    for key, value in schema.items():
        if key not in ("examples", "default", "enum"):
            yield from _unbounded(value, f"{where}.{key}")
