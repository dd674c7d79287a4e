"""JSON text: what a body may hold, checked before anything is made of it."""

from __future__ import annotations

import re

from kvmosaic.server.errors import ApiError

MAX_DEPTH = 64
MAX_VALUES = 2**18
"""Numbers, texts, lists and objects in one body: a long list of token ids, but nothing that takes seconds to read."""
MAX_DIGITS = 64

# Texts are skipped whole, also one that never ends: to look for its end from each of its quotes takes quadratic time.
# Outside of them, N and I can only begin NaN and Infinity.
_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[][{}NI]|-?[0-9][0-9.eE+-]*+', re.DOTALL)
# A pair of surrogates is one character; one of them alone, and NUL, cannot be sent back or tokenized.
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u(?:[dD][89a-fA-F][0-9a-fA-F]{2}|0000))|\\."
)


def check_json(body: bytes) -> None:
    """Refuses what is well-formed but harmful: deep nesting, NaN, endless numbers, lone surrogates, NUL.

    Takes one pass; whether it is JSON at all is left to the parser.

    Raises:
        ApiError: 400, what was found, and the limit.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        raise _refused("the body is not UTF-8") from None
    if b"\0" in body:
        raise _refused("the body holds a NUL character; remove it")
    depth = 0
    for num_values, part in enumerate(_PARTS.finditer(body)):
        first = body[part.start()]
        if num_values > MAX_VALUES:
            raise _refused(f"the body holds more than {MAX_VALUES} values; send less at once")
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _refused(f"the body is nested deeper than {MAX_DEPTH} levels; send flatter JSON")
        elif first in b"]}":
            depth -= 1
        elif first == ord('"'):
            _check_text(part.group())
        else:
            _check_number(part.group())


def _check_text(text: bytes) -> None:
    if b"\\u" in text and any(escape.group(1) for escape in _ESCAPES.finditer(text)):
        raise _refused("a text holds half a character (a lone surrogate) or a NUL character; remove it")


def _check_number(number: bytes) -> None:
    if number[0] in b"NI":
        raise _refused("NaN and Infinity are not JSON; send a number")
    if len(number) > MAX_DIGITS:
        raise _refused(f"a number has more than {MAX_DIGITS} characters; send a shorter one")
    if b"e" in number.lower():
        try:
            is_finite = abs(float(number)) < float("inf")
        except ValueError:
            return  # the parser says that better
        if not is_finite:
            raise _refused("a number is too large; send a smaller one")


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
