"""Tier plan: what a tier below the device keeps, and how many documents are found there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmosaic.capacity.model_facts import ModelFacts
from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers import parse_tier_url

Codec = Literal["none", "int8"]

_GROUP = 64
"""Numbers that share a scale of 2 bytes."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier below the device."""

    kind: str
    """`host`, `disk`, `redis` or `object`."""
    quota_bytes: int | None
    """Quota in bytes; None: unlimited, or unknown."""
    entry_bytes: int
    """Of one document; its header and tokens, a few bytes per token, are left out."""
    kept: int | None
    """Documents that fit into the quota."""
    found: float = 0.0
    """Share of requested documents found here, but not on the device or in an earlier tier."""


def plan_tier(url: str, model: ModelFacts, tokens_per_document: int, codec: Codec = "none") -> TierPlan:
    """Counts the documents that fit into a tier; opens nothing.

    Raises:
        InvalidConfig: an invalid URL or codec.
    """
    spec = parse_tier_url(url)
    entry = max(1, round(codec_share(codec, model.element_bytes) * tokens_per_document * model.kv_bytes_per_token))
    kept = None if spec.quota_bytes is None else spec.quota_bytes // entry
    return TierPlan(spec.kind, spec.quota_bytes, entry, kept)


def codec_share(codec: Codec, element_bytes: float) -> float:
    """Of the bytes of keys and values, what an entry takes.

    Raises:
        InvalidConfig: no such codec.
    """
    shares = {"none": 1.0, "int8": (1 + 2 / _GROUP) / element_bytes}
    if codec not in shares:
        raise InvalidConfig(f"codec is {codec!r}; choose from {', '.join(shares)}")
    return shares[codec]
