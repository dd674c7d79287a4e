"""Writes the table of memory inside vLLM into docs/vllm.md, counted by the code of `kvmosaic plan`.

python scripts/vllm_memory.py
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from kvmosaic.lab.capacity.model_facts import read_model

PAGE = Path(__file__).parents[1] / "docs" / "vllm.md"
HEADING = (
    "| model | one token | a document of 1,000 tokens | 10,000 of them, in host memory or Redis | 32 requests × 2,000 "
    "tokens, copies | the same, in place |\n|---|---|---|---|---|---|\n"
)
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "1.5B (Qwen 2.5: 28 layers, 2 key heads of 128)": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    "8B (Llama 3.1: 32 layers, 8 key heads of 128)": {
        **_LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
    },
    "70B (Llama 3.1: 80 layers, 8 key heads of 128)": {
        **_LLAMA,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
    },
}
DOCUMENT_TOKENS, NUM_DOCUMENTS = 1_000, 10_000
NUM_REQUESTS, TOKENS_OF_REQUEST = 32, 2_000


def rows() -> str:
    """A row for each model."""
    found = ""
    for name, config in MODELS.items():
        token = kv_bytes_per_token(config)
        read = token * TOKENS_OF_REQUEST
        sizes = (
            token,
            token * DOCUMENT_TOKENS,
            token * DOCUMENT_TOKENS * NUM_DOCUMENTS,
            read * (NUM_REQUESTS + 1),  # each has a copy, and the prefix cache has the documents
            read,
        )
        found += f"| {name} | " + " | ".join(map(text_of, sizes)) + " |\n"
    return found


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of keys and values of a token, all layers together."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return read_model(path, dtype="bfloat16").kv_bytes_per_token


def text_of(num_bytes: float) -> str:
    """A size with three digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def with_table(text: str) -> str:
    """Returns the page with this table."""
    return re.sub(rf"({re.escape(HEADING)})(?:\|.*\n)*", lambda match: match[1] + rows(), text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
