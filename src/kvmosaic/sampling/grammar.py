"""Grammars: structured outputs compiled for one model's vocabulary, and the state of an answer in one."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from kvmosaic.errors import InvalidSampling, InvalidTools, pip_install
from kvmosaic.sampling.structured import CallGrammar, StructuredOutputs

MAX_JOINED_PATTERNS = 6
"""Twelve take half a second and 60 MB, and every further one four times that."""
MAX_PATTERNS = 256
MAX_MULTIPLE = 10_000
"""Least common multiple of all `multipleOf`, without trailing zeros: a state for each remainder."""
MAX_REFERENCE_LEVELS = 512
"""Nesting of all definitions that a schema refers to, together. llguidance compiles them inside each other, and some
thousand levels overflow the stack, which ends the process."""
_ALTERNATIVES = {"anyOf", "oneOf", "$ref"}
_SAYS_NOTHING = {
    "title",
    "description",
    "default",
    "examples",
    "type",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "$comment",
}
_LITERAL = re.compile(r'"(?:[^"\\\n]++|\\.)*+("?+)|(//)[^\n]*+|/(?:[^/\\\n]++|\\.)*+(/?+)')
"""Also an unterminated one, to the end of its line: a search for its end from each of its quotes takes quadratic time.
A group has the end of a literal, or the beginning of a comment."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises InvalidSampling for a schema that is too costly; other errors are reported by llguidance."""
    _check_references(schema)
    patterns: set[str] = set()
    multiples = 1
    joins = ""
    for part in _objects(schema):
        patterns.update(value for name in ("pattern", "format") if isinstance(value := part.get(name), str))
        by_pattern = part.get("patternProperties")
        patterns.update(by_pattern if isinstance(by_pattern, Mapping) else ())
        if "allOf" in part:
            joins = "allOf"
        elif (found := sorted(_ALTERNATIVES & part.keys())) and part.keys() - _SAYS_NOTHING - {found[0]}:
            joins = joins or f"{found[0]} beside other keywords"
        multiples = math.lcm(multiples, _multiple(part.get("multipleOf")))
        if multiples > MAX_MULTIPLE:
            raise InvalidSampling(
                f"multipleOf: the common multiple of all in the JSON schema must be at most {MAX_MULTIPLE} "
                f"(without trailing zeros), got more at {part['multipleOf']!r:.40}; leave it out and check the answer"
            )
    most = MAX_JOINED_PATTERNS if joins else MAX_PATTERNS
    if len(patterns) > most:
        why = f" because {joins} may join them" if joins else ""
        raise InvalidSampling(
            f"the JSON schema has {len(patterns)} patterns and formats; at most {most} can be used{why}"
        )


def _check_references(schema: Mapping[str, Any]) -> None:
    names = {name for part in _objects(schema) if isinstance(name := part.get("$ref"), str)}
    if not names:
        return
    levels: dict[int, int] = {}
    _note_levels(schema, levels)
    total = sum(levels.get(id(_definition(schema, name)), 0) for name in names)
    if total > MAX_REFERENCE_LEVELS:
        raise InvalidSampling(
            f"the {len(names)} definitions that the JSON schema refers to with $ref are nested {total} levels deep, "
            f"counted together; at most {MAX_REFERENCE_LEVELS} are allowed: use fewer or flatter definitions"
        )


def _definition(schema: Mapping[str, Any], reference: str) -> object:
    """The part of a schema that a reference names; all of it if that is unknown."""
    part: Any = schema
    for name in unquote(reference).removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(part):
            part = part[int(name[:9])]
        else:
            return schema
    return part


def _note_levels(value: object, levels: dict[int, int]) -> int:
    """Notes the nesting of a value and of all its parts, by their identities; returns that of the value."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    if parts is None:
        return 0
    levels[id(value)] = 1 + max((_note_levels(part, levels) for part in parts), default=0)
    return levels[id(value)]


def check_grammar(lark: str) -> None:
    """Raises InvalidSampling for a Lark grammar that intersects too much, or that contains a JSON schema."""
    bare = _LITERAL.sub(_left_of_literal, lark)
    if "%json" in bare:
        raise InvalidSampling("grammar: %json cannot be used; give the schema as `json`")
    joins = bare.count("&") + bare.count("~")
    if joins > MAX_JOINED_PATTERNS:
        raise InvalidSampling(f"grammar: at most {MAX_JOINED_PATTERNS} uses of & and ~ are allowed, got {joins}")


def _left_of_literal(literal: re.Match[str]) -> str:
    """Replacement of a literal: nothing, or its text if unterminated, which llguidance may parse as anything."""
    return " " if any(literal.groups()) else literal[0]


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _objects(part)


def _multiple(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return 1
    number = Decimal(repr(value))
    return abs(int("".join(map(str, number.as_tuple().digits)).rstrip("0") or 1)) if number.is_finite() else 1


if TYPE_CHECKING:
    from kvmosaic.sampling.vocabulary import Vocabulary

MAX_CACHED_GRAMMARS = 32
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Limits of llguidance: about 50 ms of work at a time, 100 MB of states, 2,000 optional properties of one object."""
_COMPACT = {"whitespace_flexible": False, "lenient": False}
_AFTER_SPACE = {"lark_grammar": 'start: " " @inner'}


class Matcher:
    """The state of one answer in its grammar; takes its tokens one by one.

    Some tokenizers omit the space that an answer begins with (`▁Yes` is then the text "Yes"). For the first token
    of such an answer the grammar is followed twice, with and without a space before it.
    """

    def __init__(self, vocabulary: Vocabulary, plain: Any, spaced: Any | None) -> None:
        self.vocabulary = vocabulary
        self.plain = plain
        self.spaced = spaced
        """The grammar after a space, until the first token."""
        self.failure = ""
        """Why no further token can be sampled."""

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows no further token."""
        return bool(self.plain.is_stopped()) and not self.failure

    def take(self, token_id: int) -> None:
        """Advances by a token; afterwards `is_complete` or `failure` may be set."""
        if self.failure:
            return
        if self.spaced is not None and self.vocabulary.begins_with_space[token_id]:
            self.plain = self.spaced
        self.spaced = None
        if not self.plain.consume_token(token_id) or self.plain.is_error():
            self.fail(self.plain.get_error() or f"token {token_id} is not allowed")

    def fail(self, error: str) -> None:
        """Records why no further token can be sampled."""
        self.failure = f"the answer cannot go on in its grammar: {_first_line(error)}"


class Grammar:
    """A compiled grammar; every answer gets its own matcher."""

    def __init__(self, vocabulary: Vocabulary, plain: Any, spaced: Any | None) -> None:
        self._vocabulary = vocabulary
        self._plain = plain
        self._spaced = spaced

    def start(self) -> Matcher:
        """A matcher at the beginning of the grammar."""
        spaced = self._spaced.deep_copy() if self._spaced is not None else None
        return Matcher(self._vocabulary, self._plain.deep_copy(), spaced)


class GrammarCompiler:
    """Compiles structured outputs for one model, with a cache of the last few.

    `compile` may be called from any thread, at the same time. llguidance is imported, and the vocabulary prepared
    (about a second for a large one), with the first grammar.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None
        self._grammars: OrderedDict[StructuredOutputs | CallGrammar, Grammar] = OrderedDict()

    def compile(self, outputs: StructuredOutputs | CallGrammar) -> Grammar:
        """Compiles structured outputs, or returns the cached grammar.

        Raises:
            InvalidSampling: unsupported structured outputs or tokenizer, or llguidance is missing.
        """
        with self._lock:
            vocabulary = self._open()
            if (known := self._grammars.get(outputs)) is not None:
                self._grammars.move_to_end(outputs)
                return known
        grammar = self._compile(outputs, vocabulary)  # outside of the lock: the engine must not wait for a slow one
        with self._lock:
            self._grammars[outputs] = grammar
            while len(self._grammars) > MAX_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _open(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                from kvmosaic.sampling.vocabulary import Vocabulary
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "llguidance":
                    raise
                raise InvalidSampling(
                    f"structured_outputs need the package llguidance; run: {pip_install('structured')}"
                ) from None
            self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._vocabulary

    def _compile(self, outputs: StructuredOutputs | CallGrammar, vocabulary: Vocabulary) -> Grammar:
        inner = _source(outputs)
        plain, spaced = vocabulary.matcher([inner], LIMITS), None
        if vocabulary.drops_first_space and not plain.is_error():
            spaced = vocabulary.matcher([_AFTER_SPACE, {"name": "inner", **inner}], LIMITS)
        # Computes the first mask, so that errors are raised now.
        grammar = Grammar(vocabulary, plain, spaced)
        error, can_begin = plain.get_error(), False
        if not error:
            first = grammar.start()
            allowed = vocabulary.begin(first)
            allowed[list(vocabulary.eos_token_ids)] = False
            error, can_begin = first.failure, bool(allowed.any())
        if error and isinstance(outputs, CallGrammar):
            raise InvalidTools(_first_line(outputs.told(error)))
        if error:
            raise InvalidSampling(f"structured_outputs.{outputs.kind} cannot be used: {_first_line(error)}")
        if not can_begin:
            raise InvalidSampling(f"structured_outputs.{outputs.kind} allows only the empty answer")
        return grammar


def _source(outputs: StructuredOutputs | CallGrammar) -> dict[str, Any]:
    """Converts structured outputs to llguidance's format."""
    if isinstance(outputs, CallGrammar):
        return {"lark_grammar": outputs.lark}
    if (schema := outputs.schema) is not None:
        check_schema(schema)
        # Overrides the schema's own white space setting (x-guidance).
        return {"json_schema": {**schema, "x-guidance": _COMPACT}}
    if outputs.regex is not None:
        return {"lark_grammar": f"start: {_regex(outputs.regex)}"}
    if outputs.choices:
        return {
            "lark_grammar": "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in outputs.choices)
        }
    assert outputs.grammar is not None
    lark = _lark(outputs.grammar)
    check_grammar(lark)
    return {"lark_grammar": lark}


def _regex(regex: str) -> str:
    """The regular expression in Lark syntax; it matches the whole answer anyway, so enclosing ^ and $ are dropped."""
    from llguidance import regex_to_lark

    bare = regex.removeprefix("^")
    if bare.endswith("$") and (len(bare) - len(bare[:-1].rstrip("\\"))) % 2:
        bare = bare[:-1]
    return f"/{regex_to_lark(bare)}/"


def _lark(text: str) -> str:
    """The grammar as Lark; GBNF is recognized by its `::=`."""
    if "::=" not in text:
        return text
    from llguidance import grammar_from

    try:
        return str(grammar_from("gbnf", text))
    except (ValueError, RecursionError) as error:
        raise InvalidSampling(f"grammar: {_first_line(str(error))}") from None


def _first_line(error: str) -> str:
    """The message of llguidance, without the grammar and the state that follow it."""
    text = error.partition("<state>")[0].partition("<non-verbose/>")[0].strip()
    text = text.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
    return " ".join(text.split())[:500]
