from __future__ import annotations

from pathlib import Path

from tiers.conformance import TierConformance

from kvmosaic.tiers import Tier
from kvmosaic.tiers.disk import DiskTier


class TestDiskTier(TierConformance):
    def open(self, place: Path, quota_bytes: int) -> Tier:
        return DiskTier(place, quota_bytes, durable=False)
