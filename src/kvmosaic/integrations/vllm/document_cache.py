"""Settings of the document pool: how much of vLLM's KV cache it may protect, and its eviction policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.config import parse_bytes
from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import EvictionPolicy, Priority, choose

SIZE = "document_cache_size"
"""Key of `kv_connector_extra_config`, and the name of the flag of `kvmosaic vllm serve`."""
EVICTION = "document_eviction"
SETTINGS = (SIZE, EVICTION)
_PREFIX = "KVMOSAIC_"
_DEFAULTS = {SIZE: "0.5", EVICTION: "priority"}
_MAX_TOKENS = 10**12


@dataclass(frozen=True, slots=True)
class DocumentCacheConfig:
    """The bound of the document pool, in one of three units, and its policy."""

    fraction: float = 0.0
    """Of vLLM's KV cache, 0 to 1."""
    num_tokens: int = 0
    num_bytes: int = 0
    """Of the KV cache of one worker."""
    policy: EvictionPolicy = field(default_factory=Priority)

    def max_blocks(self, num_blocks: int, block_size: int, block_bytes: int) -> int:
        """The bound in blocks: at most `num_blocks`; 0: no pool.

        Args:
            num_blocks: usable blocks of vLLM's KV cache.
            block_size: tokens per block.
            block_bytes: bytes of a block on one worker.
        """
        wanted = int(self.fraction * num_blocks) + self.num_tokens // block_size + self.num_bytes // max(block_bytes, 1)
        return min(wanted, num_blocks)


def document_cache(extra: Mapping[str, Any], environ: Mapping[str, str]) -> DocumentCacheConfig:
    """Reads the settings from `kv_connector_extra_config`, or else from the environment.

    Raises:
        InvalidConfig: an invalid size or policy; the message names its setting.
    """
    size, policy = (_setting(name, extra, environ) for name in SETTINGS)
    try:
        return DocumentCacheConfig(**_read_size(size), policy=choose(str(policy)))
    except InvalidConfig as error:
        raise InvalidConfig(f"{SIZE} is {size!r:.80}, {EVICTION} is {policy!r:.80}: {error}") from None


def _setting(name: str, extra: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    return extra.get(name, environ.get(_PREFIX + name.upper()) or _DEFAULTS[name])


def _read_size(size: Any) -> dict[str, Any]:
    """The bound, by the field of `DocumentCacheConfig`."""
    said = str(size).strip().lower()
    if said in ("0", "0.0", "none"):
        return {}
    if found := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?) ?%", said):
        return {"fraction": _checked_fraction(float(found[1]) / 100)}
    if found := re.fullmatch(r"([0-9]{1,12}) ?tokens", said):
        return {"num_tokens": min(int(found[1]), _MAX_TOKENS)}
    if re.fullmatch(r"1|[01]?\.[0-9]{1,9}", said):
        return {"fraction": _checked_fraction(float(said))}
    try:
        return {"num_bytes": parse_bytes(size if isinstance(size, int) else said)}
    except InvalidConfig:
        raise InvalidConfig(
            "give a fraction of vLLM's KV cache such as 0.5, '100000 tokens', a size per worker such as '4GiB', or 0"
        ) from None


def _checked_fraction(fraction: float) -> float:
    if not 0 < fraction <= 1:
        raise InvalidConfig("a fraction is above 0 and at most 1; 0 turns the pool off")
    return fraction
