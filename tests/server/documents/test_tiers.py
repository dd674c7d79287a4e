"""Documents that are deleted or replaced leave the tiers, too, even when the device has let go of them long ago."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.documents.world import KEYS, Client, DocumentServer, JumpingClock, client_of
from support.tiers import TroubledTier

from kvmosaic.engine import Engine
from kvmosaic.server.documents.cached import sweep

TEXT = "The mayor of Fenbury is Renna Velley."


class TieredServer(DocumentServer):
    """A server over a tier that keeps everything, and a look into it."""

    tier: TroubledTier

    def leave(self) -> None:
        """Lets every chunk leave the device."""

        def evict(engine: Engine) -> None:
            assert engine.kv_cache.evict_cold(2**20, 0.0) == num_chunks
            engine.check_invariants()

        num_chunks = len(self.chunks("alpha")) + len(self.chunks("beta"))
        self.call(self.services.engine.call, evict)
        self.settle()
        assert not self.chunks("alpha") and not self.chunks("beta")

    def settle(self) -> None:
        """Waits until the tier has everything, and has lost everything, that it should."""
        assert self.llm.engine.offloader is not None and self.llm.engine.offloader.tiered_store.flush(10)

    @property
    def num_kept(self) -> int:
        self.settle()
        return len(self.tier.entries)


@pytest.fixture(scope="module", params=["error", "split"])
def tiered(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[TieredServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text("\n".join(f"- {{key: {key}, tenant: {tenant}}}" for tenant, key in KEYS.items()))
    tier = TroubledTier("disk")
    with TieredServer(keys_file=path, tiers=[tier], long_chunks=request.param, document_version_seconds=0) as running:
        running.tier = tier
        yield running


@pytest.fixture
def server(tiered: TieredServer) -> Iterator[TieredServer]:
    tiered.tier.error = None
    yield tiered
    tiered.leave()
    tiered.tier.entries.clear()
    tiered.clear()


@pytest.fixture
def alpha(server: TieredServer) -> Iterator[Client]:
    with client_of(server, "alpha") as client:
        yield client


@pytest.fixture
def beta(server: TieredServer) -> Iterator[Client]:
    with client_of(server, "beta") as client:
        yield client


@pytest.mark.parametrize("has_left", [False, True])
def test_a_deleted_document_is_in_no_tier_under_any_system_text_or_salt(
    alpha: Client, server: TieredServer, has_left: bool
) -> None:
    alpha.store("x", TEXT)
    alpha.ask({"id": "x"})
    alpha.ask({"id": "x"}, cache_salt="one")
    alpha.ask({"id": "x"}, messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}])
    assert server.num_kept == 3
    if has_left:
        server.leave()
    alpha.delete("/v1/documents/x")
    assert server.num_kept == 0
    assert alpha.ask({"id": "y", "text": TEXT})["kvmosaic"]["documents"][0]["action"] == "computed"


def test_a_replaced_document_is_in_no_tier_and_the_new_one_is(alpha: Client, server: TieredServer) -> None:
    alpha.store("x", TEXT)
    alpha.ask({"id": "x"})
    server.leave()
    alpha.store("x", TEXT, metadata={"new": "pair"})
    assert server.num_kept == 1, "the same text stays good"
    alpha.store("x", "Another text, about nothing at all.")
    assert server.num_kept == 0
    alpha.ask({"id": "x"})
    assert server.num_kept == 1


def test_an_expired_document_is_in_no_tier(
    alpha: Client, server: TieredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = JumpingClock()
    monkeypatch.setattr(server.services.documents, "_clock", clock)
    alpha.store("x", TEXT, ttl_seconds=100)
    alpha.ask({"id": "x"})
    server.leave()
    clock.ahead += 200
    server.call(sweep, server.services)
    assert server.num_kept == 0


def test_what_another_document_or_tenant_shares_stays(alpha: Client, beta: Client, server: TieredServer) -> None:
    for name in ("x", "y"):
        alpha.store(name, TEXT)
        alpha.ask({"id": name})
    beta.store("x", TEXT)
    beta.ask({"id": "x"})
    server.leave()
    assert server.num_kept == 2
    alpha.delete("/v1/documents/x")
    assert server.num_kept == 2, "the text is that of y, too"
    alpha.delete("/v1/documents/y")
    assert server.num_kept == 1
    beta.delete("/v1/documents/x")
    assert server.num_kept == 0


def test_a_text_that_came_back_under_another_name_is_deleted_by_the_first_one(
    alpha: Client, server: TieredServer
) -> None:
    alpha.store("x", TEXT)
    alpha.ask({"id": "x"})
    server.leave()
    alpha.ask({"id": "of the prompt", "text": TEXT})
    (chunk,) = server.chunks()
    assert list(chunk.names) == ["of the prompt"]
    alpha.delete("/v1/documents/x")
    assert server.num_kept == 0 and not server.chunks()


def test_a_long_document_leaves_with_all_of_its_parts() -> None:
    tier = TroubledTier("disk")
    with TieredServer(tiers=[tier], long_chunks="split", max_num_seqs=4) as server:
        server.tier = tier
        object.__setattr__(server.llm.engine.chunk_config, "max_chunk_tokens", 16)
        with Client(base_url=server.url, timeout=60) as client:
            client.store("x", TEXT * 10)
            client.ask({"id": "x"})
            assert server.num_kept > 3
            server.call(server.services.engine.call, lambda engine: engine.kv_cache.evict_cold(2**20, 0.0))
            client.delete("/v1/documents/x")
            assert server.num_kept == 0
