"""Questions over short texts about invented things, with names and numbers that are easily mixed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SYSTEM = "Answer the question from the documents, in one short sentence."
DOCUMENTS = (
    "The Aldern Observatory stands on Mount Kessa. It was opened in 1961, and its head is Dr. Ilse Morgan. "
    "Its largest mirror is 3.2 metres wide.",
    "Port Vellin is a town of 48,000 people on the Sound of Harra. Its lighthouse was built in 1887 by Tomas Reyl.",
    "The Brenn is a river of 215 km. It rises near Odal and flows through Marsten, where a bridge was built in 1934.",
    "Kessa Tea is grown on the south slope at 1,400 metres. The first leaves are picked in April by the Sandor family.",
)
QUESTIONS = (
    "Who is the head of the Aldern Observatory?",
    "In which year was the lighthouse of Port Vellin built?",
    "How long is the river Brenn?",
)
PLAIN = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "# Notes\n\n## First heading\n\nWater boils at 100 degrees.\n\n## Second heading\n\n",
)


def parts(tokenizer: Any, question: str, documents: Sequence[str] = DOCUMENTS) -> tuple[Any, list[Any], Any]:
    """Token ids of system text, documents and question, each tokenized alone, in the model's chat format."""
    system = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    asked = f"{question}<|im_end|>\n<|im_start|>assistant\n"
    chunks = [tokenizer.encode(f"{text}\n\n") for text in documents]
    return tokenizer.encode(system), chunks, tokenizer.encode(asked)
