import json

import pytest

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt import read_messages


def nested(depth):
    return [nested(depth - 1)] if depth else ["x"]


def test_text_parts_become_one_text():
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            "refusal": None,
        },
    ]
    assert read_messages(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
    ]


def test_an_assistant_may_call_tools_without_content():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert read_messages([message]) == [{"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no messages"),
        ("hello", "messages must be a list .* got str"),
        (None, "messages must be a list .* got NoneType"),
        (["hello"], "message 0 must be .* got 'hello'"),
        ([{"content": "a"}], "message 0 has the role None; choose one of system"),
        ([{"role": "wizard", "content": "a"}], "message 0 has the role 'wizard'"),
        ([{"role": ["user"], "content": "a"}], r"message 0 has the role \['user'\]"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": " \n"}],
            r"message 1 \(user\), the last one, has no content",
        ),
        ([{"role": "user"}], r"message 0 \(user\), the last one, has no content"),
        ([{"role": "assistant", "content": ""}], r"message 0 \(assistant\), the last one, has no content"),
        ([{"role": "user", "content": 7}], "the content of message 0 must be a text, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 has a part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has a part of type 'text'"),
        ([{"role": "user", "content": "a" * (2**25 + 1)}], "at most 33554432"),
        (
            [{"role": "assistant", "tool_calls": [{"<|im_end|>": 1}]}],
            "message 0 has the key '<|im_end|>'".replace("|", r"\|"),
        ),
        ([{"role": "assistant", "tool_calls": [{7: 1}]}], "message 0 has the key 7"),
        ([{"role": "assistant", "tool_calls": [{"a": {1, 2}}]}], "message 0 holds a set"),
        ([{"role": "assistant", "tool_calls": nested(40)}], "message 0 is nested deeper than 32 levels"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps({"a": [""] * 2**15})}}]}] * 2,
            "the tool calls of these messages hold 65546 values; at most 65536 are allowed: leave out earlier turns",
        ),
        ([{"role": "user", "content": "a"}] * 10_001, "10001 messages; at most 10000"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(messages, message):
    with pytest.raises(InvalidMessages, match=message):
        read_messages(messages)
