"""The preamble: the stable beginning of a system text, the only part of it that documents see.

    system text   You answer from the documents. | Today is Monday, 23 November 2026. User: ada@fenbury.org
                  preamble                         rest: changes with every request

Documents are cached for one preamble. If they saw the rest too, no request would reuse what another one computed. Where
the preamble ends depends on the request and the settings alone, so that cached and computed documents are the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kvmosaic.errors import InvalidPreamble

MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Fields that mark a part of a message as the end of what is cached, in other APIs."""
MAX_RULE_CHARACTERS = 1_000
MAX_PREAMBLE_TOKENS = 10**7
PATTERN_SECONDS = 0.1
"""Timeout of a pattern in one system text."""

_MONTHS = (
    r"jan(?:uary|\.)?|feb(?:ruary|\.)?|mar(?:ch|\.)?|apr(?:il|\.)?|may|june?|july?|aug(?:ust|\.)?|sept?(?:ember|\.)?|"
    r"oct(?:ober|\.)?|nov(?:ember|\.)?|dec(?:ember|\.)?|januar|februar|märz|mai|juni|juli|oktober|dezember|janvier|"
    r"février|mars|avril|juin|juillet|août|septembre|octobre|novembre|décembre|enero|febrero|marzo|abril|mayo|junio|"
    r"julio|agosto|septiembre|octubre|noviembre|diciembre"
)
_CHANGING = re.compile(
    "|".join(
        (
            r"(?<!\d)\d{4}([-/.])\d{1,2}\1\d{1,2}(?!\d)",  # 2026-11-23
            r"(?<!\d)\d{1,2}([-/.])\d{1,2}\2\d{2,4}(?!\d)",  # 23.11.2026
            r"(?<!\d)\d{4} ?[年년] ?\d{1,2} ?[月월] ?\d{1,2} ?[日일]",
            rf"(?<!\d)\d{{1,2}}(?:st|nd|rd|th|\.)? (?:of |de )?(?:{_MONTHS})(?!\w)",  # 23 November
            rf"(?<!\w)(?:{_MONTHS}) \d{{1,2}}(?:st|nd|rd|th)?(?!\w)",  # November 23, but not November 2026
            r"(?<![\d:])\d{1,2}:\d{2}(?![\d:]|:)",  # 10:45
            r"(?<![\d:])\d{1,2}:\d{2}:\d{2}(?!\d)",
            r"(?<!\w)\d{1,2} ?[ap]\.?m(?!\w)",  # 5 pm
            r"(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9a-f])",
            r"(?<!\d)\d{8}",  # ids, and seconds since 1970
            r"(?<=[\w.+-])@(?=[\w-]{1,63}\.\w)",  # ada@fenbury.org
        )
    ),
    re.IGNORECASE,
)
"""Dates, times of the day, UUIDs, long numbers and e-mail addresses. Every part has a bounded length: linear time."""
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*[ \t]|[。！？]")

RuleKind = Literal["auto", "all", "tokens", "text", "pattern"]


@dataclass(frozen=True)
class PreambleRule:
    """Where a preamble ends, as a setting or a request says."""

    kind: RuleKind
    value: str = ""

    def __str__(self) -> str:
        prefix = {"text": "before:", "pattern": "pattern:"}.get(self.kind, "")
        return prefix + (self.value or self.kind)

    @property
    def num_tokens(self) -> int | None:
        """Length in tokens, if the rule names one."""
        return int(self.value) if self.kind == "tokens" else None

    @cached_property
    def _pattern(self) -> Any:
        import regex  # only where a pattern is set

        return regex.compile(self.value)

    def end_in(self, text: str) -> int | None:
        """Where the preamble ends by the rule's own text or pattern; None if it has none, or it is not found.

        Raises:
            InvalidPreamble: the pattern takes too long.
        """
        if self.kind == "text":
            place = text.find(self.value)
            return place if place >= 0 else None
        if self.kind != "pattern":
            return None
        try:
            found = self._pattern.search(text, timeout=PATTERN_SECONDS)
        except TimeoutError:
            raise InvalidPreamble(
                f"the pattern of preamble={str(self)!r:.80} takes more than {PATTERN_SECONDS} s in this system text; "
                "write one without nested repetitions, or use 'before:TEXT'"
            ) from None
        return found.start() if found else None


def preamble_rule(value: object) -> PreambleRule:
    """Reads a rule.

    Args:
        value: "auto"; "all": documents see the whole system text; a number of tokens; "before:TEXT" or "pattern:REGEX":
            before the first of them; or a rule.

    Raises:
        InvalidPreamble: anything else.
    """
    if isinstance(value, PreambleRule):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and len(value) <= MAX_RULE_CHARACTERS:
        if value in ("auto", "all"):
            return PreambleRule("auto" if value == "auto" else "all")
        if value.isascii() and value.isdigit() and int(value) <= MAX_PREAMBLE_TOKENS:
            return PreambleRule("tokens", str(int(value)))
        kind, _, said = value.partition(":")
        if kind == "before" and said:
            return PreambleRule("text", said)
        if kind == "pattern" and said:
            return _pattern_rule(said)
    raise InvalidPreamble(
        f"preamble is {value!r:.80}; choose 'auto', 'all', a number of tokens up to {MAX_PREAMBLE_TOKENS}, "
        f"'before:TEXT' or 'pattern:REGEX', in at most {MAX_RULE_CHARACTERS} characters"
    )


def _pattern_rule(pattern: str) -> PreambleRule:
    import regex

    rule = PreambleRule("pattern", pattern)
    try:
        is_empty = rule._pattern.match("") is not None
    except (regex.error, ValueError, RecursionError, OverflowError) as error:
        raise InvalidPreamble(f"the pattern of preamble={str(rule)!r:.80} cannot be read: {error}") from None
    if is_empty:
        raise InvalidPreamble(f"the pattern of preamble={str(rule)!r:.80} matches an empty text, so it says nothing")
    return rule


def stable_end(text: str) -> int:
    """Where the sentence or line begins that holds the first date, time, UUID, long number or e-mail address.

    The length of the text if there is none.
    """
    found = _CHANGING.search(text)
    return len(text) if found is None else sentence_start(text, found.start())


def sentence_start(text: str, place: int) -> int:
    """The start of the sentence or line around a place, with the spaces before it."""
    line = text.rfind("\n", 0, place) + 1
    start = line
    for end in _SENTENCE_END.finditer(text, line, place):
        start = end.end()
    while start > line and text[start - 1] in " \t":
        start -= 1
    return start


def common_start(one: str, other: str) -> int | None:
    """Where the first sentence or line begins in which two texts differ; None if they are equal."""
    if one == other:
        return None
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sentence_start(one, sum(1 for _ in alike))


def is_marked(part: object) -> bool:
    """Whether a part of a message carries one of the `MARKS`."""
    return isinstance(part, Mapping) and any(part.get(mark) not in (None, False) for mark in MARKS)
