"""The Redis tier with real servers: as a tier, and in every kind of trouble."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis import RedisServer
from tiers.conformance import TierConformance

from kvmosaic.tiers import Tier
from kvmosaic.tiers.redis import RedisTier


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


class TestRedisTier(TierConformance):
    num_walks = 15
    num_rounds = 100
    has_quota = False
    has_exact_stat = False
    keeps_order = False

    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self.server = server

    def open(self, place: Path, quota_bytes: int) -> Tier:
        prefix = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return RedisTier.from_url(f"{self.server.url}?prefix={prefix}&part=1024&timeout=10&connect_timeout=10")
