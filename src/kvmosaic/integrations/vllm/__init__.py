"""Composed documents inside vLLM: a KV connector, and the ways in which documents reach it.

    contract.py     what a request says about its segments, in `kv_transfer_params`
    scheduler/      in the engine process: which chunks are there, what is moved, what is computed first
    worker/         in every worker: where the bytes are, how they are turned
    front/          in the API process: documents in a chat body, separators, handles; the Python `LLM`
    connector.py    the two halves as one vLLM connector
    plugin.py       what vLLM loads at its start

Nothing of vLLM is patched: the connector, the middleware and the entry point are vLLM's own ways in.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.generating import chat, engine_arguments, generate
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

__all__ = ["ComposedDocuments", "chat", "engine_arguments", "generate"]

# Names are imported on first use: vLLM loads this package in each of its processes.
_HOMES = {
    "ComposedDocuments": "kvmosaic.integrations.vllm.front.middleware",
    "chat": "kvmosaic.integrations.vllm.front.generating",
    "engine_arguments": "kvmosaic.integrations.vllm.front.generating",
    "generate": "kvmosaic.integrations.vllm.front.generating",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
