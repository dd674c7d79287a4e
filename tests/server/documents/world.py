"""A server with three tenants, clients that ask it, and a clock that jumps."""

from __future__ import annotations

import time
from typing import Any

import httpx
from support.server import RunningServer

from kvmosaic.cache import Chunk
from kvmosaic.documents import DocumentStore
from kvmosaic.engine import Engine
from kvmosaic.server.documents.cached import sweep

KEYS = {"alpha": "alpha-key-1", "beta": "beta-key-1", "small": "small-key-1"}


class JumpingClock:
    """Unix seconds that pass, and a jump ahead when told to."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class DocumentServer(RunningServer):
    """The real server, and a look into its cache."""

    def chunks(self, tenant: str = "alpha") -> list[Chunk]:
        """All chunks of a tenant."""

        def read(engine: Engine) -> list[Chunk]:
            return [chunk for chunk in engine.kv_cache.chunks() if chunk.tenant == tenant]

        found: list[Chunk] = self.call(self.services.engine.call, read)
        return found

    def clear(self) -> None:
        """Deletes all documents, forgets all chunks, and checks that nothing is left over."""
        old = self.services.documents
        for tenant in KEYS:
            for document in old.documents(tenant):
                old.delete(tenant, document.id)
        self.call(sweep, self.services)
        store = DocumentStore(
            default_ttl_seconds=old.default_ttl_seconds, version_seconds=old.version_seconds, limits=old.limits
        )
        self.call(old.__dict__.update, store.__dict__)

        def empty(engine: Engine) -> None:
            engine.kv_cache.reset()
            engine.check_invariants()
            assert not engine.kv_cache.chunks() and not engine.has_unfinished_requests
            assert engine.kv_cache.chunk_pool.num_used == 0
            assert not any(len(engine.kv_cache._chunks.account(tenant).pinned_names) for tenant in KEYS)

        self.call(self.services.engine.call, empty)


class Client(httpx.Client):
    """An HTTP client that asks the reader over documents."""

    def ask(self, *documents: Any, question: str = "Who is the mayor?", **body: Any) -> dict[str, Any]:
        """The reply to one short question."""
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "documents": list(documents), "max_tokens": 1, "temperature": 0, **body}
        reply = self.post("/v1/chat/completions", json={"model": "reader", **body})
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def store(self, document_id: str, text: str = "The mayor of Fenbury is Renna Velley.", **body: Any) -> Any:
        """Stores a document."""
        reply = self.put(f"/v1/documents/{document_id}", json={"text": text, **body})
        assert reply.status_code in (200, 201), reply.text
        return reply.json()


def client_of(server: RunningServer, tenant: str) -> Client:
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    return Client(base_url=server.url, headers=headers, timeout=60, trust_env=False)
