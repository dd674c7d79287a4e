"""Example documents of the dashboard: the bundled texts with ids, and questions about some of them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

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
