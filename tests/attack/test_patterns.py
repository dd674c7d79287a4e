"""No regular expression of ours takes more than linear time, whatever text it is given.

Every pattern in the source is found by reading the source, so that a new one cannot be forgotten. Texts that it might
stumble over are made from the pattern itself: pieces of what it accepts, repeated, with something in the end that it
does not accept. A pattern that takes quadratic time on any of them takes 16 times as long for 4 times the text.
"""

from __future__ import annotations

import ast
import random
import re
import string
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from re import _constants as names
from re import _parser as parser
from typing import Any

import pytest

import kvmosaic

SOURCE = Path(kvmosaic.__file__).parent
SHORT = 3_000
"""Repetitions; a quadratic pattern makes some ten million steps, tens of milliseconds, of them."""
SUSPICIOUS_SECONDS = 2e-3
MAX_GROWTH = 8.0
"""For four times the text."""
METHODS = {"compile", "search", "match", "fullmatch", "sub", "split", "findall", "finditer"}
NUM_WORDS = 12
LONGEST_PIECE = 4

OURS = {
    "bench/measurement.py": "reads what the system says of this process",
    "server/dashboard/views.py": "reads our own page",
    "model/unsupported.py": "reads names of classes",
    "capacity/meta_count.py": "reads names of parameters",
    "integrations/vllm/worker/diagnostics.py": "reads names of layers and classes",
}
"""Files whose patterns never meet a text from outside."""


def patterns(folder: str) -> Iterator[tuple[str, ast.Call, set[str]]]:
    """Place, call, and the methods by which the pattern is used."""
    for path in sorted((SOURCE / folder).rglob("*.py") if folder else SOURCE.glob("*.py")):
        place, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        if place in OURS or "re." not in text:
            continue
        tree = ast.parse(text)
        kept = {assign.value: assign.targets[0] for assign in ast.walk(tree) if isinstance(assign, ast.Assign)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if not isinstance(node.func.value, ast.Name) or node.func.value.id != "re" or not node.args:
                continue
            if node.func.attr in METHODS:
                uses = {node.func.attr} - {"compile"}
                if isinstance(name := kept.get(node), ast.Name):
                    uses = set(re.findall(rf"\b{name.id}\.([a-z]+)\(", text))
                yield place, node, uses or METHODS


def value_of(place: str, node: ast.Call) -> re.Pattern[Any]:
    """The pattern of a call, with names of its module filled in, and anything else by an ordinary word."""
    module = kvmosaic.__name__ + "." + place.removesuffix(".py").replace("/", ".")
    scope = vars(__import__(module.removesuffix(".__init__"), fromlist=["_"]))
    outside = {name.id: "ab" for name in ast.walk(node) if isinstance(name, ast.Name) and name.id not in scope}
    known = {"__builtins__": __builtins__, **outside, **scope}
    pattern = eval(compile(ast.Expression(node.args[0]), place, "eval"), known)
    flags = [keyword.value for keyword in node.keywords if keyword.arg == "flags"]
    flags += node.args[1:2] if node.func.attr == "compile" else []  # type: ignore[attr-defined]
    return re.compile(pattern, *[eval(compile(ast.Expression(flag), place, "eval"), known) for flag in flags])


@pytest.mark.parametrize("folder", ["", *sorted(path.name for path in SOURCE.iterdir() if any(path.glob("**/*.py")))])
def test_patterns_take_linear_time(folder: str) -> None:
    faults = []
    for place, node, uses in patterns(folder):
        try:
            check_time(place, node, uses, SHORT)
        except AssertionError as fault:
            faults.append(f"{place}:{node.lineno}: {fault}")
    assert not faults, "\n".join(faults)


def check_time(place: str, node: ast.Call, uses: set[str], size: int) -> None:
    pattern = value_of(place, node)
    runs = [run for names_of_run, run in RUNS if uses & names_of_run]
    for text in texts(pattern):
        for run in runs:
            if seconds_of(run, pattern, text(size)) < SUSPICIOUS_SECONDS:
                continue
            # the least of three: a machine that stood still for a moment proves nothing
            short, long = (min(seconds_of(run, pattern, text(times)) for _ in range(3)) for times in (size, 4 * size))
            assert long < MAX_GROWTH * max(short, SUSPICIOUS_SECONDS / 4), (
                f"{pattern.pattern!r} takes {short * 1e3:.1f} ms for {text(1)!r} {size} times, "
                f"and {long * 1e3:.1f} ms for four times as many"
            )


def test_a_quadratic_pattern_is_found() -> None:
    for wrong in (r'"(?:[^"\\]+|\\.)*"', r"\s+$", r"(a|b)*c", r"\s*<state>", r"a*b"):
        with pytest.raises(AssertionError, match="four times as many"):
            find_fault(wrong)


def find_fault(pattern: str) -> None:
    node = ast.parse(f"re.compile({pattern!r})", mode="eval").body
    assert isinstance(node, ast.Call)
    check_time("config/setting.py", node, METHODS, SHORT // 2)


def find_all(pattern: re.Pattern[Any], text: Any) -> None:
    for _ in pattern.finditer(text):
        pass


RUNS: list[tuple[set[str], Callable[[re.Pattern[Any], Any], object]]] = [
    ({"match"}, re.Pattern.match),
    ({"fullmatch"}, re.Pattern.fullmatch),
    (METHODS - {"match", "fullmatch"}, find_all),
]


def seconds_of(run: Callable[[re.Pattern[Any], Any], object], pattern: re.Pattern[Any], text: str | bytes) -> float:
    begin = time.thread_time()
    run(pattern, text)
    return time.thread_time() - begin


def texts(pattern: re.Pattern[Any]) -> Iterator[Callable[[int], Any]]:
    """By a number of repetitions: head, piece again and again, tail."""
    chance = random.Random(0)
    is_bytes = isinstance(pattern.pattern, bytes)
    tree = parser.parse(pattern.pattern, pattern.flags)
    pieces: set[tuple[str, str]] = set()
    for _ in range(NUM_WORDS):
        word = "".join(example(tree, chance))
        for begin in range(min(len(word), 12)):
            for end in range(begin + 1, min(begin + LONGEST_PIECE, len(word)) + 1):
                pieces.add((word[:begin], word[begin:end]))
    for head, piece in sorted(pieces):
        for tail in ("", "\n\x01"):
            yield partial(grown, head, piece, tail, is_bytes)


def grown(head: str, piece: str, tail: str, as_bytes: bool, times: int) -> str | bytes:
    text = head + piece * times + tail
    return text.encode() if as_bytes else text


def example(tree: Any, chance: random.Random) -> Iterator[str]:
    """Characters that a parsed pattern accepts; what it only looks at is left out."""
    for kind, value in tree:
        if kind is names.LITERAL:
            yield chr(value)
        elif kind in (names.NOT_LITERAL, names.ANY, names.IN, names.CATEGORY):
            yield _character(kind, value, chance)
        elif kind is names.BRANCH:
            yield from example(chance.choice(value[1]), chance)
        elif kind is names.SUBPATTERN:
            yield from example(value[-1], chance)
        elif kind is names.ATOMIC_GROUP:
            yield from example(value, chance)
        elif kind in (names.MAX_REPEAT, names.MIN_REPEAT, names.POSSESSIVE_REPEAT):
            least, most, inner = value
            for _ in range(chance.randint(least, max(least, min(int(most), 2)))):
                yield from example(inner, chance)


_COMMON = string.ascii_letters + string.digits + " \t\n\"'\\/.,:;!?()[]{}<>-_#=|~&@$%^*+`"


def _character(kind: Any, value: Any, chance: random.Random) -> str:
    matcher = re.compile(parser_text(kind, value), re.DOTALL)
    fitting = [character for character in _COMMON if matcher.fullmatch(character)]
    return chance.choice(fitting or ["x"])


def parser_text(kind: Any, value: Any) -> str:
    """One character's pattern, written again."""
    if kind is names.ANY:
        return "."
    if kind is names.NOT_LITERAL:
        return f"[^{re.escape(chr(value))}]"
    parts = []
    for what, inner in value:
        if what is names.NEGATE:
            parts.insert(0, "^")
        elif what is names.LITERAL:
            parts.append(re.escape(chr(inner)))
        elif what is names.RANGE:
            parts.append(f"{re.escape(chr(inner[0]))}-{re.escape(chr(inner[1]))}")
        elif what is names.CATEGORY:
            parts.append(_CATEGORIES[inner])
    return f"[{''.join(parts)}]"


_CATEGORIES = {
    names.CATEGORY_DIGIT: r"\d",
    names.CATEGORY_NOT_DIGIT: r"\D",
    names.CATEGORY_SPACE: r"\s",
    names.CATEGORY_NOT_SPACE: r"\S",
    names.CATEGORY_WORD: r"\w",
    names.CATEGORY_NOT_WORD: r"\W",
}
