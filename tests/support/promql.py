"""Names and labels in PromQL, found well enough to hold an expression against what a server exports."""

from __future__ import annotations

import re

_KEYWORDS = {"by", "on", "and", "or", "unless", "without", "ignoring", "bool", "sum", "min", "max", "avg"}
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{([^}]*)\}")
_MATCHER = re.compile(r"\s*([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"\s*,?")


def names_in(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", text)
    text = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", r"\1 ", text)
    words = re.findall(r"(?<![\w.:])([a-zA-Z_:][a-zA-Z0-9_:]*)(\s*\()?", text)
    return {word for word, call in words if not call and word not in _KEYWORDS}


def matchers_in(expression: str) -> list[tuple[str, str, str]]:
    """(metric, label, value or pattern) of every label that an expression asks for."""
    return [
        (name, label, value)
        for name, inside in _SELECTOR.findall(expression)
        for label, value in _MATCHER.findall(inside)
    ]
