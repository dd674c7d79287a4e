"""JSON as it arrives: where a value ends, and whether what is there so far can be the beginning of one."""

from __future__ import annotations

import re

MAX_DEPTH = 64
MAX_NUMBER_CHARACTERS = 1_000
_TEXT = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_NUMBER_PART = re.compile(r"[-+.eE0-9]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "true", "f": "false", "n": "null"}


class JsonScanner:
    """Reads one JSON value in pieces, each character once.

        {"city": "Os|lo", "days": 2}|
                    ^ scanned so far ^ is_complete

    Attributes:
        is_complete: the value has ended.
        is_broken: what was read is no beginning of a JSON value; nothing is read afterwards.
        num_keys: keys with their colon, of all objects together.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self.num_keys = 0
        self._open: list[str] = []
        self._expects = "value"
        self._is_key = False
        self._rest = ""
        """What must follow of a word, or how many hex digits, one letter each."""
        self._number = ""

    def scan(self, text: str, start: int = 0) -> int:
        """Reads on from a character; returns where it stopped: after the value, at a wrong character, or at the end."""
        place = start
        while place < len(text) and not (self.is_complete or self.is_broken):
            place = getattr(self, f"_in_{self._expects}")(text, place)
        return place

    def end(self) -> None:
        """Takes note that no text follows: a number at the end is complete now."""
        if self._expects == "number" and not self._open:
            self._end_number()

    def _break(self, place: int) -> int:
        self.is_broken = True
        return place

    def _end_value(self) -> None:
        if self._open:
            self._expects = "comma"
        else:
            self.is_complete = True

    def _in_value(self, text: str, place: int) -> int:
        if space := _SPACE.match(text, place):
            return space.end()
        character = text[place]
        if character == "]" and self._expects == "first_item":
            return self._close(text, place)
        if character in "{[":
            if len(self._open) >= MAX_DEPTH:
                return self._break(place)
            self._open.append(character)
            self._expects = "first_key" if character == "{" else "first_item"
        elif character == '"':
            self._expects, self._is_key = "string", False
        elif character in _WORDS:
            self._expects, self._rest = "word", _WORDS[character][1:]
        elif character in "-0123456789":
            self._expects, self._number = "number", ""
            return place
        else:
            return self._break(place)
        return place + 1

    _in_first_item = _in_value

    def _in_key(self, text: str, place: int) -> int:
        if space := _SPACE.match(text, place):
            return space.end()
        if text[place] == '"':
            self._expects, self._is_key = "string", True
            return place + 1
        if text[place] == "}" and self._expects == "first_key":
            return self._close(text, place)
        return self._break(place)

    _in_first_key = _in_key

    def _in_colon(self, text: str, place: int) -> int:
        if space := _SPACE.match(text, place):
            return space.end()
        if text[place] != ":":
            return self._break(place)
        self.num_keys += 1
        self._expects = "value"
        return place + 1

    def _in_comma(self, text: str, place: int) -> int:
        if space := _SPACE.match(text, place):
            return space.end()
        if text[place] == ",":
            self._expects = "key" if self._open[-1] == "{" else "value"
            return place + 1
        return self._close(text, place)

    def _close(self, text: str, place: int) -> int:
        if text[place] != {"{": "}", "[": "]"}[self._open[-1]]:
            return self._break(place)
        self._open.pop()
        self._end_value()
        return place + 1

    def _in_string(self, text: str, place: int) -> int:
        if run := _TEXT.match(text, place):
            return run.end()
        if text[place] == "\\":
            self._expects = "escape"
            return place + 1
        if text[place] != '"':
            return self._break(place)  # a control character
        if self._is_key:
            self._expects = "colon"
        else:
            self._end_value()
        return place + 1

    def _in_escape(self, text: str, place: int) -> int:
        if text[place] == "u":
            self._expects, self._rest = "hex", "xxxx"
        elif text[place] in '"\\/bfnrt':
            self._expects = "string"
        else:
            return self._break(place)
        return place + 1

    def _in_hex(self, text: str, place: int) -> int:
        if text[place] not in _HEX:
            return self._break(place)
        self._rest = self._rest[1:]
        if not self._rest:
            self._expects = "string"
        return place + 1

    def _in_word(self, text: str, place: int) -> int:
        if text[place] != self._rest[0]:
            return self._break(place)
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return place + 1

    def _in_number(self, text: str, place: int) -> int:
        if run := _NUMBER_PART.match(text, place):
            self._number += run[0]
            if len(self._number) > MAX_NUMBER_CHARACTERS:
                return self._break(place)
            return run.end()
        self._end_number()
        return place

    def _end_number(self) -> None:
        if _NUMBER.fullmatch(self._number):
            self._end_value()
        else:
            self.is_broken = True
