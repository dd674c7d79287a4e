"""A value of a record with its path, for errors that name the wrong one."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvmosaic.errors import InvalidConfig, InvalidDocument
from kvmosaic.prompt.separator import check_unicode

MAX_ITEMS = 100_000


@dataclass(frozen=True, slots=True)
class JSONField:
    """A value inside a record. Everything it is asked for is checked.

    Raises:
        InvalidConfig: from every method, where the value is not what is asked for; the message begins with its name.
    """

    name: str
    """Its path: `context[3].title`; empty for the record itself."""
    value: object

    def member(self, *names: str) -> JSONField:
        """The first of these members of an object that is there."""
        members = self._members()
        for name in names:
            if members.get(name) is not None:
                return JSONField(f"{self.name}.{name}" if self.name else name, members[name])
        raise self.wrong(f"there is no {' or '.join(map(repr, names))}")

    def has(self, *names: str) -> bool:
        """Whether all of these members are there, with a value."""
        return all(self._members().get(name) is not None for name in names)

    def items(self) -> list[JSONField]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise self.wrong(f"it must be a list, got {self.value!r:.80}")
        if len(self.value) > MAX_ITEMS:
            raise self.wrong(f"it has {len(self.value)} items; at most {MAX_ITEMS} are allowed")
        return [JSONField(f"{self.name}[{index}]", item) for index, item in enumerate(self.value)]

    def pair(self) -> tuple[JSONField, JSONField]:
        """The items of a list of two."""
        items = self.items()
        if len(items) != 2:
            raise self.wrong(f"it must have 2 items, got {len(items)}")
        return items[0], items[1]

    def text(self) -> str:
        """A text; it may be empty. Lines end with a line feed only."""
        if not isinstance(self.value, str):
            raise self.wrong(f"it must be a text, got {self.value!r:.80}")
        try:
            check_unicode(self.value, InvalidDocument)
        except InvalidDocument as error:
            raise self.wrong(str(error)) from None
        return self.value.replace("\r\n", "\n").replace("\r", "\n")

    def filled_text(self) -> str:
        """A text that says something."""
        text = self.text()
        if not text.strip():
            raise self.wrong("it is empty; leave the record out")
        return text

    def texts(self) -> tuple[str, ...]:
        """A list of texts that say something, at least one of them."""
        texts = tuple(item.filled_text() for item in self.items())
        if not texts:
            raise self.wrong("it is empty; leave the record out")
        return texts

    def label(self) -> str:
        """A short text or a whole number, as ids are."""
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        return self.filled_text()

    def is_true(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong(f"it must be true or false, got {self.value!r:.80}")
        return self.value

    def unpacked(self) -> JSONField:
        """The value that a text holds as JSON, as in tables whose cells cannot hold lists; any other value itself."""
        if not isinstance(self.value, str):
            return self
        try:
            return JSONField(self.name, json.loads(self.value))
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"it is a text that is not JSON: {error}") from None

    def wrong(self, what: str) -> InvalidConfig:
        """An error about this value."""
        return InvalidConfig(f"{self.name}: {what}" if self.name else what)

    def _members(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            raise self.wrong(f"it must be an object, got {self.value!r:.80}")
        return self.value
