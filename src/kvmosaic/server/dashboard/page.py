"""Page of the dashboard: its HTML file, its Content-Security-Policy and its example documents."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Only this server's address, only the script and style of the file, no text as markup, no embedding in frames."""

_QUESTIONS = (
    (
        "Who is the captain of the Amber Pearl?",
        ("Talmira Varlow", "Amber Pearl", "Corlow Lighthouse", "Golden Anchor Museum", "Fenbury"),
    ),
    (
        "What does Torren Briwick drink in the morning?",
        ("Golden Anchor Museum", "Bellos", "Torren Briwick", "Amber Pearl", "Talmira Varlow"),
    ),
    (
        "How high is the Corlow Lighthouse?",
        ("Bellos", "Fenbury", "Talmira Varlow", "Corlow Lighthouse", "Torren Briwick"),
    ),
)
"""Each question reads other documents in another order, so that the second one finds most of its documents cached."""


@dataclass(frozen=True, slots=True)
class Markup:
    """The HTML file with its Content-Security-Policy header."""

    text: str
    policy: str

    @classmethod
    def read(cls) -> Markup:
        """Reads the file from the package; the policy allows script and style by their hashes."""
        text = files("kvmosaic.server.dashboard").joinpath("page.html").read_text(encoding="utf-8")
        return cls(text, POLICY.format(script=hash_of("script", text), style=hash_of("style", text)))


def hash_of(element: str, text: str) -> str:
    """Returns the source of the one element of this kind without attributes, for a Content-Security-Policy."""
    contents = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    assert len(contents) == 1, f"one <{element}> without attributes, or the policy does not fit"
    return f"'sha256-{b64encode(sha256(contents[0].encode()).digest()).decode()}'"


def example_documents() -> list[dict[str, str]]:
    """Returns the bundled documents as `{"id", "title", "text"}`, sorted by title."""
    paths = (path for path in files("kvmosaic").joinpath("bundled", "documents").iterdir())
    texts = {path.name.removesuffix(".txt"): path for path in paths if path.name.endswith(".txt")}
    return [
        {"id": _id_of(title), "title": title, "text": path.read_text(encoding="utf-8").strip()}
        for title, path in sorted(texts.items())
    ]


def example_questions() -> list[dict[str, Any]]:
    """Returns questions about them as `{"question", "documents"}`, with the ids to read in this order."""
    return [{"question": question, "documents": [_id_of(title) for title in titles]} for question, titles in _QUESTIONS]


def _id_of(title: str) -> str:
    return title.lower().replace(" ", "-")
