"""What tiers inside vLLM count."""

from __future__ import annotations

from kvmosaic.cache.keys import Key
from kvmosaic.tiers import Deadline, HostTier, TieredStore
from kvmosaic.vllm.report_counters import ReportCounters
from kvmosaic.vllm.worker.tier_side import TierCounts


def test_counts_grow_by_what_is_new_and_are_looked_at_once_a_second():
    now = 100.0
    tiered_store: TieredStore[bytes] = TieredStore([HostTier(1000)], max_pending_bytes=1000)
    counts, tally = TierCounts(tiered_store, lambda: now), ReportCounters()
    (tier,) = tiered_store.tiers
    for _ in range(2):
        tier.put_many({Key(bytes(32)): b"entry"}, Deadline(1.0))
        tier.get_many([Key(bytes(32)), Key(bytes([1] * 32))], Deadline(1.0))
        counts.add_to(tally)
        assert counts.add_to(tally) is None  # too early
        taken = tally.take()
        assert taken is not None
        assert taken["counts"] == {
            "kvmosaic:tier_hits": {"host": 1},
            "kvmosaic:tier_misses": {"host": 1},
            "kvmosaic:tier_puts": {"host": 1},
            "kvmosaic:tier_written_bytes": {"host": 5},
            "kvmosaic:tier_read_bytes": {"host": 5},
        }
        now += 1.1
    tiered_store.close()
