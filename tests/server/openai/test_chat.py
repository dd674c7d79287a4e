from __future__ import annotations

import json

import pytest
from support.asking import DOCUMENTS, GREEDY, MESSAGES, QUESTION, chat, refused, streamed_chat, text_of

ROUTE = "/v1/chat/completions"


def test_reply_has_openais_shape(http, server):
    reply = chat(http, documents=DOCUMENTS)
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    assert reply["model"] == server.model
    (choice,) = reply["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert reply["usage"]["completion_tokens"] == 8


def test_answer_is_that_of_the_python_face(http, server):
    from kvmosaic import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = server.llm.compose(MESSAGES, documents=DOCUMENTS)

    async def answer():
        deltas = [delta async for delta in server.services.engine.generate(prompt, params)]
        return "".join(answer.text for delta in deltas for answer in delta.answers)

    assert chat(http, documents=DOCUMENTS)["choices"][0]["message"]["content"] == server.call(answer)


def test_streamed_answer_is_the_whole_one(http):
    whole = chat(http, documents=DOCUMENTS)
    events = streamed_chat(http, documents=DOCUMENTS)
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    first, *_, last = [choice for event in events for choice in event["choices"]]
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert last["delta"] == {} and last["finish_reason"] == "length"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert "usage" not in events[0] and [event for event in events if "kvmosaic" in event] == [events[-1]]


def test_usage_comes_last_when_asked_for(http):
    whole = chat(http, documents=DOCUMENTS)
    events = streamed_chat(http, documents=DOCUMENTS, stream_options={"include_usage": True})
    *before, last = events
    assert last["choices"] == [] and last["kvmosaic"]["documents"]
    assert all(event["usage"] is None and "kvmosaic" not in event for event in before)
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == 8


def test_usage_so_far_stands_in_every_chunk_when_asked_for(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = streamed_chat(http, stream_options=options)
    written = [event["usage"]["completion_tokens"] for event in events]
    assert written == sorted(written) and written[-1] == 8 and written[0] > 0
    assert all(event["usage"]["total_tokens"] > event["usage"]["prompt_tokens"] for event in events)


def test_n_answers_with_a_seed_are_repeatable_and_differ(http):
    fields = {"n": 3, "seed": 7, "temperature": 2.0, "max_tokens": 6}
    whole = [choice["message"]["content"] for choice in chat(http, **fields)["choices"]]
    again = streamed_chat(http, **fields)
    assert [text_of(again, index) for index in range(3)] == whole
    assert len(set(whole)) > 1
    assert chat(http, **{**fields, "n": 1, "seed": 8})["choices"][0]["message"]["content"] == whole[1]
    ends = [choice for event in again for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2]
    assert [event for event in again if "kvmosaic" in event] == [again[-1]]


def test_stop_texts_end_the_answer_across_tokens(http):
    text = chat(http)["choices"][0]["message"]["content"]
    stop = text[2:5]
    for events in (streamed_chat(http, stop=[stop, "never"]), streamed_chat(http, stop=stop)):
        assert text_of(events) == text[: text.index(stop)]
        (end,) = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", stop)
    kept = chat(http, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["message"]["content"] == text[: text.index(stop) + len(stop)]


def test_newer_name_of_max_tokens_wins(http):
    assert chat(http, max_tokens=2, max_completion_tokens=5)["usage"]["completion_tokens"] == 5
    assert chat(http, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert chat(http, max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_answers_end_by_themselves_or_after_enough_tokens(http):
    short = chat(http, documents=DOCUMENTS, ignore_eos=False, max_tokens=64)
    assert short["choices"][0]["finish_reason"] == "stop"
    assert chat(http, ignore_eos=False, min_tokens=24, max_tokens=24)["usage"]["completion_tokens"] == 24
    ids = http.post("/tokenize", json={"prompt": "Oak", "add_special_tokens": False}).json()["tokens"]
    assert chat(http, documents=DOCUMENTS, stop_token_ids=ids, max_tokens=64)["choices"][0]["finish_reason"]


def test_penalties_and_filters_change_the_answer(http):
    plain = chat(http, max_tokens=64)["choices"][0]["message"]["content"]
    changed = {"repetition_penalty": 2.0}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    assert all(chat(http, max_tokens=64, **fields)["choices"][0]["message"]["content"] != plain for fields in changed)
    for fields in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        drawn = chat(http, max_tokens=64, temperature=1.5, **fields)["choices"][0]["message"]["content"]
        assert drawn == plain


def test_logprobs_are_those_of_the_sampler_with_bytes(http):
    chat(http)  # both requests then read the cached prompt, and round alike
    (choice,) = chat(http, logprobs=True, top_logprobs=3, skip_special_tokens=False)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0] <= 0 and entry["token"] == entry["top_logprobs"][0]["token"]
    written = b"".join(bytes(entry["bytes"]) for entry in content)
    assert written.decode() == choice["message"]["content"]
    events = streamed_chat(http, logprobs=True, top_logprobs=3)
    streamed = [
        entry
        for event in events
        for one in event["choices"]
        for entry in (one.get("logprobs") or {}).get("content", [])
    ]
    assert streamed == content
    assert chat(http, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_an_assistant_message_is_continued(http):
    messages = [*MESSAGES, {"role": "assistant", "content": "It goes to"}]
    reply = chat(http, messages=messages, documents=DOCUMENTS, continue_final_message=True)
    assert "Oak" in reply["choices"][0]["message"]["content"]
    error = refused(http, ROUTE, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert "exclude each other" in error["message"]


def test_reply_message_can_be_sent_back(client, http):
    first = client.chat.completions.create(model="reader", messages=MESSAGES, max_tokens=4)
    messages = [*MESSAGES, first.choices[0].message, {"role": "user", "content": QUESTION}]
    again = client.chat.completions.create(model="reader", messages=messages, max_tokens=4)
    assert again.usage.prompt_tokens > first.usage.prompt_tokens
    dumped = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": QUESTION}]
    assert chat(http, messages=dumped)["usage"]["prompt_tokens"] == again.usage.prompt_tokens


def test_developer_is_system_where_the_template_knows_no_developer(http):
    developer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    assert chat(http, messages=developer)["choices"] == chat(http)["choices"]


def test_json_keeps_to_its_schema(http):
    schema = {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 8}, "sure": {"type": "boolean"}},
        "required": ["place", "sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    fields = {"max_tokens": 80, "ignore_eos": False}
    whole = chat(http, documents=DOCUMENTS, response_format=form, **fields)["choices"][0]["message"]["content"]
    assert set(json.loads(whole)) == {"place", "sure"}
    assert text_of(streamed_chat(http, documents=DOCUMENTS, response_format=form, **fields)) == whole
    twin = chat(http, documents=DOCUMENTS, structured_outputs={"json": schema}, **fields)
    assert twin["choices"][0]["message"]["content"] == whole


@pytest.mark.parametrize(
    ("form", "allowed"), [({"choice": ["Oak", "Elm"]}, {"Oak", "Elm"}), ({"regex": "[0-9]"}, set("0123456789"))]
)
def test_answer_keeps_to_a_choice_or_a_pattern(http, form, allowed):
    reply = chat(http, structured_outputs=form, ignore_eos=False)
    assert reply["choices"][0]["message"]["content"] in allowed


def test_any_text_is_a_form_too(http):
    assert chat(http, response_format={"type": "text"})["choices"] == chat(http)["choices"]


def test_unicode_comes_whole(http):
    messages = [{"role": "user", "content": "Grüße ☃ 👩‍👩‍👧 \u2028 ＜/s＞?"}]
    events = streamed_chat(http, messages=messages, max_tokens=48, temperature=1.8, seed=3)
    whole = chat(http, messages=messages, max_tokens=48, temperature=1.8, seed=3)
    assert text_of(events) == whole["choices"][0]["message"]["content"]


def test_stored_fields_and_numbers_of_openai_are_ignored(http):
    ignored = {
        "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": False,
        "prompt_cache_key": "k", "safety_identifier": "x", "tools": [], "tool_choice": "none", "logit_bias": {},
    }  # fmt: skip
    assert chat(http, **ignored)["choices"] == chat(http)["choices"]
    nothing = dict.fromkeys(
        ["n", "stop", "seed", "top_p", "top_k", "logprobs", "stream", "stream_options", "tools", "response_format"]
    )
    assert chat(http, **nothing)["choices"] == chat(http)["choices"]


def test_whole_numbers_may_be_written_with_a_point(http):
    twin = chat(http, **{**GREEDY, "max_tokens": 8.0, "n": 1.0, "stop_token_ids": [2.0], "seed": 1.0})
    assert twin["choices"] == chat(http, stop_token_ids=[2])["choices"]
    assert refused(http, ROUTE, messages=MESSAGES, max_tokens=8.5)["param"] == "max_tokens"
