"""The RAG application, end to end: a real server, a real vector store, vectors of words in place of a model's."""

from __future__ import annotations

import re
import runpy
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.server import RunningServer

APPLICATION = Path(__file__).parents[2] / "examples" / "rag" / "rag.py"
TEXTS = {
    "people/jonas.md": "Jonas Kelberg works as a teacher. He lives in Halport.",
    "people/marla.html": "<h1>Marla</h1><p>Marla Denwick works as a baker. She lives in Tolbury.</p>",
    "ships.txt": "The Silver Heron was built in 1874. Its cargo is timber.",
}


def folder_of(path: Path) -> Path:
    """A folder with three files that the bundled model can answer from."""
    for name, text in TEXTS.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def word_vectors(texts: Sequence[str]) -> list[list[float]]:
    """Counts of words, hashed: near where texts have words in common."""
    vectors = np.zeros((len(texts), 256))
    for row, text in zip(vectors, texts, strict=True):
        for word in re.findall(r"\w+", text.lower()):
            row[zlib.crc32(word.encode()) % 256] += 1
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()


def test_questions_are_answered_from_the_passages_found_and_reuse_them(tmp_path: Path) -> None:
    parts: dict[str, Any] = runpy.run_path(str(APPLICATION))
    with RunningServer() as server:
        rag = parts["RAG"](server.url, word_vectors, tmp_path / "store")
        rag.add(parts["passages_of"](folder_of(tmp_path / "texts")))
        first = rag.ask("Where does Jonas Kelberg live?", limit=2)
        again = rag.ask("What does Jonas Kelberg work as?", limit=2)
        rag.close()
    documents = first["kvmosaic"]["documents"]
    assert documents[0]["id"] == "people/jonas.md#0" and {each["action"] for each in documents} == {"computed"}
    assert "Halport" in first["choices"][0]["message"]["content"]
    assert "computed" not in {each["action"] for each in again["kvmosaic"]["documents"]}


def test_long_file_is_cut_at_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "long.md").write_text("\n\n".join(f"Paragraph {number} " + "word " * 60 for number in range(12)))
    passages = runpy.run_path(str(APPLICATION))["passages_of"](tmp_path)
    assert len(passages) > 2 and all(each.text.startswith("Paragraph") for each in passages)
    assert passages[1].id == "long.md#1"
