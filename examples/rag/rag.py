"""A whole RAG application: passages of a folder in a vector store, and answers from the passages that fit a question.

    pip install -c constraints.txt '.[server,files]' lancedb    # in a checkout
    kvmosaic serve                                              # in another terminal
    python examples/rag/rag.py examples/documents "Who is the mayor of Fenbury?"

The embedding model (all-MiniLM-L6-v2, Apache-2.0) and the vector store (LanceDB) run in this process. The server stores
each passage once, under its id; a question sends ids only, and passages that were read before are not computed again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import lancedb

from kvmosaic.extraction import extract_text, is_readable

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PASSAGE_CHARACTERS = 1_000
Embed = Callable[[Sequence[str]], list[list[float]]]


@dataclass(frozen=True)
class Passage:
    """A part of a file, small enough to be found by one vector."""

    id: str
    text: str


def passages_of(folder: Path) -> list[Passage]:
    """The files of a folder, in passages of whole paragraphs."""
    passages = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and is_readable(path.name):
            parts = [""]
            for paragraph in extract_text(path.read_bytes(), path.name).text.split("\n\n"):
                if parts[-1] and len(parts[-1]) + len(paragraph) > PASSAGE_CHARACTERS:
                    parts.append("")
                parts[-1] += paragraph + "\n\n"
            name = path.relative_to(folder).as_posix()
            passages += [Passage(f"{name}#{number}", text.strip()) for number, text in enumerate(parts)]
    return passages


def embedding_model(name: str = MODEL) -> Embed:
    """A sentence transformer: the mean of its last states, with length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = []
        for start in range(0, len(texts), 32):
            batch = list(texts[start : start + 32])
            tokens = tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="pt")
            mask = tokens["attention_mask"].unsqueeze(-1)
            mean = (model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
            vectors += torch.nn.functional.normalize(mean).tolist()
        return vectors

    return embed


class RAG:
    """Finds passages in a vector store, and asks a server about them."""

    def __init__(self, server: str, embed: Embed, store: Path) -> None:
        self._embed = embed
        self._store = lancedb.connect(store)
        self._client = httpx.Client(base_url=server, timeout=300)

    def add(self, passages: Sequence[Passage]) -> None:
        """Embeds passages, and stores their texts on the server; nothing is computed there yet."""
        vectors = self._embed([passage.text for passage in passages])
        rows = [{"id": passage.id, "vector": vector} for passage, vector in zip(passages, vectors, strict=True)]
        self._store.create_table("passages", data=rows, mode="overwrite")
        lines = "\n".join(json.dumps({"id": passage.id, "text": passage.text}) for passage in passages)
        reply = self._client.post(
            "/v1/documents:batch", content=lines, headers={"Content-Type": "application/jsonl"}
        ).raise_for_status()
        for refused in (each for each in reply.json()["data"] if each["status"] == "refused"):
            print(f"line {refused['line']} is refused: {refused['error']['message']}")

    def find(self, question: str, limit: int = 3) -> list[str]:
        """Ids of the passages that are nearest to a question."""
        (vector,) = self._embed([question])
        found = self._store.open_table("passages").search(vector).limit(limit).to_list()
        return [str(row["id"]) for row in found]

    def ask(self, question: str, limit: int = 3) -> dict[str, Any]:
        """The reply of the server to a question about the nearest passages."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "documents": [{"id": passage_id} for passage_id in self.find(question, limit)],
            "max_tokens": 64,
            "temperature": 0,
        }
        reply: dict[str, Any] = self._client.post("/v1/chat/completions", json=body).raise_for_status().json()
        return reply

    def close(self) -> None:
        """Closes the connection to the server."""
        self._client.close()


def main() -> None:
    """Reads the command line, and answers the questions."""
    parser = argparse.ArgumentParser(description="Answer questions about a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=MODEL, help="embedding model: a name of the hub, or a folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        rag = RAG(arguments.server, embedding_model(arguments.model), Path(store))
        rag.add(passages_of(arguments.folder))
        for question in arguments.questions:
            reply = rag.ask(question)
            print(reply["choices"][0]["message"]["content"])
            for document in reply["kvmosaic"]["documents"]:
                print(f"    {document['id']}: {document['action']}")
        rag.close()


if __name__ == "__main__":
    main()
