"""The RAG application with its real embedding model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from real.conftest import MODELS
from support.server import RunningServer

EMBEDDING = MODELS / "all-MiniLM-L6-v2"
APPLICATION = Path(__file__).parents[2] / "examples" / "rag" / "rag.py"
TEXTS = {
    "jonas": "Jonas Kelberg works as a teacher. He lives in Halport.",
    "marla": "Marla Denwick works as a baker. She lives in Tolbury.",
    "heron": "The Silver Heron was built in 1874. Its cargo is timber.",
}


def test_passages_are_found_by_meaning(tmp_path: Path) -> None:
    if not EMBEDDING.is_dir():
        pytest.skip(f"{EMBEDDING} is not there; make test-real fetches it")
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.md").write_text(text)
    parts = runpy.run_path(str(APPLICATION))
    with RunningServer() as server:
        rag = parts["RAG"](server.url, parts["embedding_model"](str(EMBEDDING)), tmp_path / "store")
        rag.add(parts["passages_of"](tmp_path))
        assert rag.find("Who makes bread?", 1) == ["marla.md#0"]  # no word in common
        assert rag.find("What does the vessel carry?", 1) == ["heron.md#0"]
        reply = rag.ask("Where does Jonas Kelberg live?", limit=2)
        rag.close()
    assert "Halport" in reply["choices"][0]["message"]["content"]
