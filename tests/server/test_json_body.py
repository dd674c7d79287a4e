from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.api.errors import ApiError
from kvmosaic.api.json_limits import MAX_DEPTH, MAX_DIGITS, MAX_VALUES, check_json

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
numbers = st.integers(-(10**MAX_DIGITS) // 100, 10**MAX_DIGITS // 100) | st.floats(
    allow_nan=False, allow_infinity=False
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(values, st.booleans())
def test_ordinary_json_passes(value: object, escaped: bool) -> None:
    check_json(json.dumps(value, ensure_ascii=escaped).encode())


@given(values, st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"']))
def test_harm_anywhere_is_refused(value: object, harm: str) -> None:
    body = json.dumps({"before": value, "harm": "?", "after": value}).replace('"harm": "?"', f'"harm": {harm}')
    with pytest.raises(ApiError) as caught:
        check_json(body.encode())
    assert caught.value.status == 400


@given(st.text(st.sampled_from('\\"nuD8d0ICNaN{}[]9'), max_size=40))
def test_what_stands_inside_a_text_is_only_text(text: str) -> None:
    check_json(json.dumps({"text": text}, ensure_ascii=False).encode())


@given(values, st.lists(st.sampled_from(["\0", "\ud83d", "\udc00", "\\", "u", "é", "😀"]), max_size=9).map("".join))
def test_broken_characters_of_a_text_are_replaced_and_said(value: object, text: str) -> None:
    escaped = json.dumps({"text": text, "value": value, "documents": [text, {"id": "m", "text": "😀" + text}]})
    mended, warnings = check_json(escaped.encode())
    replaced = re.sub("[\0\ud800-\udfff]", "\ufffd", json.loads(json.dumps(text)))
    documents = [replaced, {"id": "m", "text": "😀" + replaced}]
    assert json.loads(mended) == {"text": replaced, "value": value, "documents": documents}
    if "\ufffd" not in replaced:
        assert (mended, warnings) == (escaped.encode(), ())
        return
    said, at = "NUL or lone surrogates were replaced by U+FFFD, the first at character", replaced.index("\ufffd")
    number = replaced.count("\ufffd")
    places = [("text", at), ("documents.0", at), ("documents.1 ('m').text", at + 1)]
    assert warnings == tuple(f"{place}: {number} {said} {start}" for place, start in places)


def test_warnings_about_many_texts_are_bounded() -> None:
    _, warnings = check_json(json.dumps({"documents": ["\0"] * 100}).encode())
    assert len(warnings) == 17 and warnings[-1] == "and in 84 more texts"


@pytest.mark.parametrize("path", ["cache_salt", "documents.id", "messages.role", "tools.parameters", "document\0s"])
def test_names_keep_their_characters(path: str) -> None:
    value: object = "a\0"
    for name in reversed(path.split(".")):
        value = [{name: value}] if name in ("id", "role", "parameters") else {name: value}
    with pytest.raises(ApiError, match="lone surrogate"):
        check_json(json.dumps(value).encode())


def test_arguments_of_calls_and_metadata_have_any_fields() -> None:
    body = {"messages": [{"content": [{"type": "tool_use", "input": {"path": ["a\0"]}}]}], "metadata": {"a": "\0"}}
    assert json.loads(check_json(json.dumps(body).encode())[0])["messages"][0]["content"][0]["input"]["path"] == ["a�"]


def test_escaped_backslash_before_u_is_no_escape() -> None:
    check_json(rb'{"a": "\\ud800 \\u0000 \\\\u0000"}')
    with pytest.raises(ApiError):
        check_json(rb'{"a": "\\\ud800"}')


@given(st.lists(st.sampled_from(['"', "\\", "\\" * 70, '"' * 20, "NaN", "[" * 70]), max_size=12))
def test_end_of_a_long_text_is_found(parts: list[str]) -> None:
    check_json(json.dumps(["".join(parts), 1]).encode())
    with pytest.raises(ApiError, match="NaN"):
        check_json(json.dumps(["".join(parts), float("nan")]).encode())


@given(st.lists(st.integers(0, 10**20) | st.floats(0, 1), max_size=30), st.sampled_from([",", ", ", " ,\n"]))
def test_harm_behind_a_list_of_numbers_is_refused(numbers: list[float], comma: str) -> None:
    written = [*map(str, numbers), "9" * MAX_DIGITS]
    check_json(f"[{comma.join(written)}]".encode())
    with pytest.raises(ApiError, match="more than 64 characters"):
        check_json(f"[{comma.join([*written, '9' * (MAX_DIGITS + 1)])}]".encode())


def test_depth_is_limited() -> None:
    check_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(ApiError, match="nested deeper than 64"):
        check_json(b'{"a":' * (MAX_DEPTH + 1))


def test_number_of_values_is_limited() -> None:
    check_json(b"[" + b"1," * (MAX_VALUES - 3) + b"1]")
    with pytest.raises(ApiError, match="more than 262144 values"):
        check_json(b"[" + b"1," * MAX_VALUES + b"1]")


def test_length_of_a_number_is_limited() -> None:
    check_json(b"9" * MAX_DIGITS)
    with pytest.raises(ApiError, match="more than 64 characters"):
        check_json(b"9" * (MAX_DIGITS + 1))


@pytest.mark.parametrize("body", [b'"\xff"', '{"a": 1}'.encode("utf-16"), b'"a\0"', b'"\xed\xa0\x80"'])
def test_other_encodings_and_raw_nul_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        check_json(body)


@pytest.mark.parametrize("body", [b"", b'"', b'"\\', b"{]", b"1e", b"-", b"1.2.3e", b"nonsense"])
def test_broken_json_is_left_to_the_parser(body: bytes) -> None:
    check_json(body)


def test_many_backslashes_take_linear_time() -> None:
    check_json(b'"' + b"\\" * 2**20)
    check_json(b'"' + b"\\u" * 2**19 + b'"')
