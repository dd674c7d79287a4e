from __future__ import annotations

import pytest
from support.asking import MESSAGES, refused

ROUTE = "/v1/chat/completions"
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def deep(levels):
    return {"a": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_sallt": "x"}, "cache_sallt"),
        ({"documents": [{"text": "a", "titel": "b"}]}, "documents.0"),
        ({"messages": [{"role": "user", "content": "a", "texts": 1}]}, "messages.0.texts"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "tools"),
        ({"function_call": {"name": "f"}}, "tool_choice"),
        ({"audio": {"voice": "x", "format": "mp3"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"the": 3}}, "logit_bias.the"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages.0"),
        ({"messages": [IMAGE]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [TOOL]}]}, "messages.0"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ["a"] * 129}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"priority": 2**40}, "priority"),
        ({"position_strategy": "diagonal"}, "position_strategy"),
        ({"chunk_context": "all"}, "chunk_context"),
        ({"chunk_context": 1}, "chunk_context"),
        ({"cache_salt": "x" * 5000}, "cache_salt"),
        ({"repair": "x" * 101}, "repair"),
        ({"repair": 0.15}, "repair"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"chat_template_kwargs": deep(40)}, "chat_template_kwargs"),
        ({"metadata": deep(40)}, "metadata"),
    ],
)
def test_field_is_refused_by_its_name(http, fields, param):
    error = refused(http, ROUTE, **{"messages": MESSAGES, **fields})
    assert error["status"] == 400 and error["type"] == "invalid_request_error"
    assert error["param"] and error["param"].startswith(param), error


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9"),
        ({"structured_outputs": {}}, ""),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, ""),
        ({"structured_outputs": {"regex": "("}}, ""),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "given twice"),
        ({"documents": ["a", {"title": "no text"}]}, "document number 2 has neither a text nor the id"),
        ({"messages": [{"role": "user", "content": " "}]}, "no content"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "the prompt has 100"),
        ({"chat_template_kwargs": {"tokenize": True}}, "'tokenize'"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "'chat_template'"),
        ({"chat_template_kwargs": {"documents": []}}, "'documents'"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages'"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "'bos_token'"),
        ({"chat_template_kwargs": {"not a name": 1}}, "'not a name'"),
        ({"chat_template_kwargs": {"salt": "x"}}, "'salt'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(http, fields, message):
    error = refused(http, ROUTE, **{"messages": MESSAGES, **fields})
    assert error["status"] == 400 and message in error["message"], error


def test_a_prompt_that_is_too_long_has_openais_code(http):
    long = [{"role": "user", "content": "word " * 20_000}]
    for stream in (False, True):
        assert refused(http, ROUTE, messages=long, stream=stream)["code"] == "context_length_exceeded"


def test_models_are_listed(http, client, server):
    (model,) = client.models.list().data
    assert model.id == server.model and model.owned_by == "kvmosaic"
    assert client.models.retrieve(server.model) == model
    reply = http.get("/v1/models/other/one")
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"


def test_an_image_is_refused_in_words_that_name_it(http):
    error = refused(http, ROUTE, messages=[IMAGE])
    assert error["status"] == 400
    assert "'image_url' is not supported: models here read text only" in error["message"]
