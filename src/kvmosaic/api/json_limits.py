"""Limits of JSON that apply before it is parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from kvmosaic.api.errors import ApiError

MAX_DEPTH = 64
MAX_VALUES = 2**18
"""Maximum number of values in one body: enough for a long list of token ids, too few to take seconds to parse."""
MAX_DIGITS = 64

# Outside of strings, N and I can only begin NaN and Infinity. Token ids come in hundreds of thousands: a run of short
# integers is one part.
_PARTS = re.compile(rb'(?:[0-9]{1,18}+[,\s]++)++|["\][{}NI]|-?[0-9][0-9.eE+-]*+')
# A string is skipped whole, also an unterminated one: to search its end from each of its quotes takes quadratic time.
_REST_OF_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+"?+', re.DOTALL)
_MAX_ESCAPED_QUOTES = 16
"""Number of escaped quotes checked one by one, which is a hundred times as fast for a long string without any."""
_MAX_BACKSLASHES = 64
"""Number of backslashes before one quote counted in the same way."""
# A pair of surrogates is one character; a lone surrogate, and NUL, cannot be sent back or tokenized.
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u(?:[dD][89a-fA-F][0-9a-fA-F]{2}|0000))|\\."
)


_BROKEN = re.compile("[\0\ud800-\udfff]")
_TEXTS: Final = frozenset(
    "text content prompt input instructions system documents title context data thinking reasoning_content arguments "
    "description output".split()
)
"""Fields whose texts the model reads."""
_FREE: Final = frozenset({"input", "metadata"})
"""Objects of the client, with any fields."""
_MAX_LISTED = 16


def check_json(body: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Refuses well-formed but harmful bodies: deep nesting, NaN, endless numbers.

    Takes one pass; the parser checks whether the body is JSON at all.

    Returns:
        The body, with texts as of `mended`, and warnings about them.

    Raises:
        ApiError: 400, what was found, and the limit.
    """
    if not _holds_broken_texts(body):
        return body, ()
    try:
        value, warnings = mended(json.loads(body))
    except ValueError:
        return body, ()  # the parser has a better message
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), warnings


def mended(body: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns a parsed body with U+FFFD in place of each NUL and lone surrogate in texts, and warnings.

    Raises:
        ApiError: 400, there is one in a name, such as an id or a salt.
    """
    found = list[str]()
    whole = _mended(body, "", found, is_text=False)
    more = [f"and in {len(found) - _MAX_LISTED} more texts"] if len(found) > _MAX_LISTED else []
    return whole, (*found[:_MAX_LISTED], *more)


def _mended(value: Any, place: str, found: list[str], *, is_text: bool, is_free: bool = False) -> Any:
    if isinstance(value, str) and (first := _BROKEN.search(value)):
        where = place.removeprefix(".") or "the body"
        if not is_text:
            raise _refused(f"{where} holds half a character (a lone surrogate) or a NUL character; remove it")
        whole, number = _BROKEN.subn("\ufffd", value)
        found.append(
            f"{where}: {number} NUL or lone surrogates were replaced by U+FFFD, the first at character {first.start()}"
        )
        return whole
    if isinstance(value, Mapping):
        return {
            _mended(key, place, found, is_text=False): _mended(
                item,
                f"{place}.{key:.64}",
                found,
                is_text=is_free or key in _TEXTS,
                is_free=is_free or (key in _FREE and isinstance(item, Mapping)),
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            _mended(item, f"{place}.{index}{_name_of(item)}", found, is_text=is_text, is_free=is_free)
            for index, item in enumerate(value)
        ]
    return value


def _name_of(item: Any) -> str:
    name = item.get("id") if isinstance(item, Mapping) else None
    return f" ({name!r:.80})" if isinstance(name, str) else ""


def _holds_broken_texts(body: bytes) -> bool:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        raise _refused("the body is not UTF-8") from None
    if b"\0" in body:
        raise _refused("the body holds a NUL character; remove it")
    has_escapes = b"\\u" in body
    is_broken = False
    depth = num_values = position = 0
    while part := _PARTS.search(body, position):
        position = part.end()
        first = body[part.start()]
        is_run = body[position - 1] in b", \t\r\n"
        num_values += body.count(b",", part.start(), position) if is_run else 1
        if num_values > MAX_VALUES:
            raise _refused(f"the body holds more than {MAX_VALUES} values; send less at once")
        if first == ord('"'):
            position = _end_of_text(body, position)
            if has_escapes and not is_broken:
                is_broken = _is_broken(body, part.end(), position)
        elif first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _refused(f"the body is nested deeper than {MAX_DEPTH} levels; send flatter JSON")
        elif first in b"]}":
            depth -= 1
        elif not is_run:
            _check_number(part.group())
    return is_broken


def check_json_type(content_type: str) -> None:
    """Refuses a body that is not sent as JSON.

    A page of another origin could send any other type through its visitor's browser.

    Raises:
        ApiError: 400, the type that the header says.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = f"{kind[:100]!r}" if kind else "nothing"
        message = (
            f"the body must be JSON, sent with the header 'Content-Type: application/json'; the header says {said}"
        )
        raise ApiError(400, message, code="invalid_content_type")


def _end_of_text(body: bytes, begin: int) -> int:
    """Returns the position after the closing quote of the string that begins at `begin`, or after the body."""
    position = begin
    for _ in range(_MAX_ESCAPED_QUOTES):
        quote = body.find(b'"', position)
        if quote < 0:
            return len(body)
        before = body[max(position, quote - _MAX_BACKSLASHES) : quote]
        num_backslashes = len(before) - len(before.rstrip(b"\\"))
        if num_backslashes == _MAX_BACKSLASHES:
            break
        if num_backslashes % 2 == 0:
            return quote + 1
        position = quote + 1
    rest = _REST_OF_TEXT.match(body, position)
    return rest.end() if rest else len(body)


def _is_broken(body: bytes, begin: int, end: int) -> bool:
    return body.find(b"\\u", begin, end) >= 0 and any(each[1] for each in _ESCAPES.finditer(body, begin, end))


def _check_number(number: bytes) -> None:
    if number[0] in b"NI":
        raise _refused("NaN and Infinity are not JSON; send a number")
    if len(number) > MAX_DIGITS:
        raise _refused(f"a number has more than {MAX_DIGITS} characters; send a shorter one")
    if b"e" in number.lower():
        try:
            is_finite = abs(float(number)) < float("inf")
        except ValueError:
            return  # the parser has a better message
        if not is_finite:
            raise _refused("a number is too large; send a smaller one")


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
