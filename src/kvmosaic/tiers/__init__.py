"""Offload tiers for chunks evicted from the device: host memory, disk, Redis, object stores."""

from kvmosaic.tiers.disk.tier import DiskTier
from kvmosaic.tiers.fetch import Fetch, Rank, TieredStoreStats
from kvmosaic.tiers.fetch_policy import ComputeCost, FetchPolicy, LoadCost
from kvmosaic.tiers.host import HostTier
from kvmosaic.tiers.tier import MAX_ENTRY_BYTES, MAX_KEY_BYTES, Deadline, Entry, Tier, TierStat
from kvmosaic.tiers.tiered_store import TieredStore
from kvmosaic.tiers.url import TierSpec, open_tier, open_tiers, parse_tier_url
