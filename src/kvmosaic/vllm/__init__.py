"""vLLM integration: a KV connector for composed documents, and the ways in which documents reach it.

    contract.py     segments of a request, in `kv_transfer_params`
    scheduler/      in the engine process: finds cached chunks, plans moves, requests missing chunks
    worker/         in every worker: locates keys and values, rotates and moves them
    front/          in the API process: documents in a body, separators, stored documents; the Python `LLM`
    connector.py    scheduler side and worker side as one vLLM connector
    plugin.py       entry point that vLLM loads at startup

Connector, middleware and entry point are vLLM's own extension points. Only reports have none on their way to an answer:
the middleware wraps one method of the engine's client (`report.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.vllm.front.middleware import ComposedDocuments
    from kvmosaic.vllm.front.python_api import chat, engine_arguments, generate

__all__ = ["ComposedDocuments", "chat", "engine_arguments", "generate"]

# Names are imported on first use: vLLM loads this package in each of its processes.
_HOMES = {
    "front.middleware": ("ComposedDocuments",),
    "front.python_api": ("chat", "engine_arguments", "generate"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
