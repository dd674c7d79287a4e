"""One server with three tenants, empty before every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.documents.world import KEYS, Client, DocumentServer, client_of


@pytest.fixture(scope="session")
def documents_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    lines = [f"- {{key: {key}, tenant: {tenant}}}" for tenant, key in KEYS.items() if tenant != "small"]
    path.write_text("\n".join([*lines, f"- {{key: {KEYS['small']}, tenant: small, quota: 640KiB}}"]))
    limits = {"max_documents": 50, "max_documents_bytes": 100_000}
    with DocumentServer(keys_file=path, document_version_seconds=0, long_chunks="error", **limits) as running:
        yield running


@pytest.fixture
def server(documents_server: DocumentServer) -> Iterator[DocumentServer]:
    yield documents_server
    documents_server.clear()


@pytest.fixture
def alpha(server: DocumentServer) -> Iterator[Client]:
    with client_of(server, "alpha") as client:
        yield client


@pytest.fixture
def beta(server: DocumentServer) -> Iterator[Client]:
    with client_of(server, "beta") as client:
        yield client


@pytest.fixture
def small(server: DocumentServer) -> Iterator[Client]:
    with client_of(server, "small") as client:
        yield client
