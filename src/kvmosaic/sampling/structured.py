"""Structured outputs: the required form of an answer, with vLLM's names."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvmosaic.errors import InvalidSampling
from kvmosaic.tools.request import is_deeper

MAX_SCHEMA_BYTES = 131_072
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARACTERS = 4_096
MAX_GRAMMAR_CHARACTERS = 65_536
MAX_CHOICES = 1_024
MAX_CHOICE_CHARACTERS = 4_096
MAX_CHOICES_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer; exactly one field is given.

    JSON is written without spaces and line breaks between its parts, so that a model cannot repeat them forever.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a mapping. Stored as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression (of Rust's regex crate) that the whole answer matches."""
    choice: Iterable[str] | None = None
    """The answer is one of these texts. Stored as a tuple."""
    grammar: str | None = None
    """A context-free grammar in llguidance's dialect of Lark, or in GBNF (`root ::= …`)."""

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise InvalidSampling(f"json_object must be True or False, got {self.json_object!r:.80}")
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise InvalidSampling(
                f"structured_outputs needs exactly one of {names}; got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARACTERS)
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARACTERS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> StructuredOutputs:
        """Builds it from names and values, for example of a JSON body.

        Raises:
            InvalidSampling: an unknown name, or an invalid value.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(str(name) for name in settings if name not in known)
        if unknown:
            raise InvalidSampling(
                f"unknown fields of structured_outputs {', '.join(unknown)[:200]}; known are {', '.join(known)}"
            )
        return cls(**settings)

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(field.name for field in fields(self) if getattr(self, field.name) not in (None, False))

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema as a mapping, if the answer is JSON."""
        if self.json_object:
            return {"type": "object"}
        schema = json_module.loads(self.json) if isinstance(self.json, str) else None
        assert schema is None or isinstance(schema, dict)
        return schema

    @property
    def choices(self) -> tuple[str, ...]:
        """`choice` as a tuple."""
        return tuple(self.choice or ())


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The form of an answer with tool calls: a grammar that `kvmosaic.tools` made of checked tools.

    Unlike a caller's grammar it contains JSON schemas and control tokens.
    """

    lark: str
    names: tuple[str, ...]
    """Of its tools, by the numbers in the names of the rules."""
    kind = "tools"

    def told(self, error: str) -> str:
        """An error of llguidance without its excerpt of the grammar, with the name of the tool whose rule it quotes."""
        place = re.match(r"at (\d+)\(\d+\): ", error)
        rule = re.match(r"\w+_(\d+):", self.lark.split("\n")[int(place[1]) - 1]) if place else None
        if place is None or rule is None:
            return f"tools cannot be used: {error}"
        reason = re.split(r"\n *\d+ \| ", error[place.end() :], maxsplit=1)[0]
        return f"tool {self.names[int(rule[1])]!r} cannot be used: {reason}"


def _check_text(name: str, text: object, most: int) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= most:
        size = f"{len(text)} characters" if isinstance(text, str) else f"{text!r:.80}"
        raise InvalidSampling(f"{name} must be a text of 1 to {most} characters, got {size}")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidSampling(f"{name} contains a NUL or half a surrogate pair, which no answer can contain")


def _choices(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str | bytes | Mapping) or not isinstance(choice, Iterable):
        raise InvalidSampling(f"choice must be a list of texts, got {choice!r:.80}")
    texts = tuple(choice)
    if not 0 < len(texts) <= MAX_CHOICES:
        raise InvalidSampling(f"choice must have 1 to {MAX_CHOICES} texts, got {len(texts)}")
    for text in texts:
        _check_text("a choice", text, MAX_CHOICE_CHARACTERS)
    if (total := sum(map(len, texts))) > MAX_CHOICES_CHARACTERS:
        raise InvalidSampling(f"the texts of choice have {total} characters; at most {MAX_CHOICES_CHARACTERS} together")
    return tuple(dict.fromkeys(texts))


def _schema(schema: object) -> str:
    """The schema as compact text; its keys keep their order, which is the order of the answer."""
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_BYTES:
            raise InvalidSampling(f"the JSON schema has {len(schema)} characters; at most {MAX_SCHEMA_BYTES} bytes")
        try:
            schema = json_module.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidSampling(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise InvalidSampling(f"a JSON schema must be an object, got {schema!r:.80}")
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise InvalidSampling(
            f"the JSON schema is nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten it, or use $ref"
        )
    try:
        text = json_module.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise InvalidSampling(f"the JSON schema cannot be written as JSON: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise InvalidSampling(f"the JSON schema has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed")
    return text
