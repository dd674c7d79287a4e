"""Validated fields of an untrusted JSON object."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvmosaic.errors import InvalidConfig, InvalidProfile

Choice = TypeVar("Choice", bound=str)


class Fields:
    """A JSON object that is read field by field; `end` refuses fields that were not read.

    Every method raises InvalidProfile, with the name of the field, its value and what it should be.
    """

    def __init__(self, content: object, place: str = "") -> None:
        self._place = place
        if not isinstance(content, Mapping):
            raise InvalidProfile(f"{place.rstrip('.') or 'the file'} must be a JSON object, got {content!r:.80}")
        self._content = content
        self._read: set[str] = set()

    def version(self, name: str, known: tuple[int, ...]) -> None:
        """Checks the version of the format."""
        found = self._take(name)
        if found not in known or isinstance(found, bool):
            versions = " and ".join(map(str, known))
            raise InvalidProfile(f"its format {name} is {found!r:.80}, and this version reads {versions}; tune again")

    def text(self, name: str, most: int) -> str:
        """A printable text of at most `most` characters."""
        value = self._take(name)
        if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
            raise self._wrong(name, value, f"1 to {most} printable characters")
        return value

    def matching(self, name: str, pattern: str, what: str) -> str:
        """A text that matches a pattern."""
        value = self._take(name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise self._wrong(name, value, what)
        return value

    def choice(self, name: str, choices: tuple[Choice, ...]) -> Choice:
        """One of these texts."""
        value = self._take(name)
        for known in choices:
            if value == known:
                return known
        raise self._wrong(name, value, " or ".join(choices))

    def read(self, name: str, reader: Callable[[str], str]) -> str:
        """A text that `reader` validates."""
        value = self.text(name, 200)
        try:
            return reader(value)
        except InvalidConfig as error:
            raise InvalidProfile(f"{self._place}{name}: {error}") from None

    def number(self, name: str, low: float, high: float) -> float:
        """A number within limits."""
        value = self._take(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise self._wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def number_if_known(self, name: str, low: float, high: float) -> float | None:
        """A number within limits; None if the field is missing or null."""
        if self._content.get(name) is None:
            self._read.add(name)
            return None
        return self.number(name, low, high)

    def whole(self, name: str, low: int, high: int) -> int:
        """A whole number within limits."""
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._take(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def inner(self, name: str) -> Fields:
        """An object within this one."""
        return Fields(self._take(name), f"{self._place}{name}.")

    def several(self, name: str, most: int) -> list[Fields]:
        """A list of objects, at least one."""
        value = self._take(name)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise self._wrong(name, value, f"a list of 1 to {most} objects")
        return [Fields(each, f"{self._place}{name}.{number}.") for number, each in enumerate(value)]

    def end(self) -> None:
        """Refuses unread fields: a mistyped name must not count as an absent field."""
        if unknown := sorted(str(name) for name in self._content if name not in self._read):
            raise InvalidProfile(f"{self._place}{unknown[0]:.80} is unknown; remove it, or look at how it is spelled")

    def _take(self, name: str) -> Any:
        if name not in self._content:
            raise InvalidProfile(f"{self._place}{name} is missing")
        self._read.add(name)
        return self._content[name]

    def _wrong(self, name: str, value: object, what: str) -> InvalidProfile:
        return InvalidProfile(f"{self._place}{name} is {value!r:.80}; it must be {what}")
