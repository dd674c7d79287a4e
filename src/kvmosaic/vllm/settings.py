"""Settings of the plugin in vLLM's engine: documents read in place or copied, their cache, its tiers, and a demand.

They come from `kv_connector_extra_config`, or else from the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvmosaic.config import TierConfig, parse_bytes, variable_of
from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import EvictionPolicy, Priority, choose

READS_VARIABLE = "KVMOSAIC_DOCUMENT_READS"
"""Read in every process of vLLM: attention is chosen before any of our parts has vLLM's configuration."""
DocumentReads = Literal["copy", "in-place"]


def document_reads(environ: Mapping[str, str]) -> DocumentReads:
    """The setting; "copy" if it is unset.

    Raises:
        InvalidConfig: another value.
    """
    said = environ.get(READS_VARIABLE) or "copy"
    if said not in get_args(DocumentReads):
        raise InvalidConfig(f"{READS_VARIABLE} is {said!r:.80}; choose 'copy' or 'in-place'")
    return said  # type: ignore[return-value]


REQUIRED_SETTING = "require_composing"
"""Key of `kv_connector_extra_config`."""
REQUIRED_VARIABLE = "KVMOSAIC_REQUIRE_COMPOSING"
_SWITCH = {"1": True, "true": True, "0": False, "false": False, "": False}


def is_composing_required(extra: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Reads the setting from `kv_connector_extra_config`, or else from the environment.

    Raises:
        InvalidConfig: another value than true or false.
    """
    if REQUIRED_SETTING in extra:
        if not isinstance(extra[REQUIRED_SETTING], bool):
            raise InvalidConfig(
                f"{REQUIRED_SETTING} is {extra[REQUIRED_SETTING]!r:.80} in kv_connector_extra_config; "
                "give true or false"
            )
        return bool(extra[REQUIRED_SETTING])
    value = environment.get(REQUIRED_VARIABLE, "")
    if value.lower() not in _SWITCH:
        raise InvalidConfig(f"{REQUIRED_VARIABLE} is {value!r:.80}; give 1 or 0")
    return _SWITCH[value.lower()]


def require_composing(reason: str) -> None:
    """Raises InvalidConfig if there is a reason why documents cannot be composed."""
    if reason:
        raise InvalidConfig(
            f"documents cannot be composed here, and --require-composing ({REQUIRED_VARIABLE}) is set: {reason}. "
            "Change that, or leave the setting out: documents are then part of ordinary prompts"
        )


SIZE = "document_cache_size"
"""Key of `kv_connector_extra_config`, and the name of the flag of `kvmosaic vllm serve`."""
EVICTION = "document_eviction"
SETTINGS = (SIZE, EVICTION)
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
    return extra.get(name, environ.get(variable_of(name)) or _DEFAULTS[name])


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


FROM_VARIABLE = "env:"
_OPTIONS = ("loading", "pending", "staged")


def tier_config(extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> TierConfig | None:
    """Reads the tiers of an engine; None without any.

        {"tiers": ["host:4GiB", "env:CHUNK_REDIS"], "loading": "always", "staged": "1GiB"}

    Args:
        extra: `kv_connector_extra_config`. vLLM prints it, so a URL with a password is given as `env:` and the name of
            a variable that holds it; the secret of the entries is always a variable.
        environment: environment variables of the process.

    Raises:
        InvalidConfig: an invalid setting, or a lossy codec: what is loaded here becomes part of vLLM's own prefix
            cache, which ordinary prompts use, so it must be exact.
    """
    places = extra.get("tiers")
    if not places:
        return None
    if not isinstance(places, list | tuple) or not all(isinstance(place, str) for place in places):
        raise InvalidConfig(f'tiers is {places!r:.80}; give a list such as ["host:4GiB", "redis://host:6379/0"]')
    if extra.get("codec", "none") != "none":
        raise InvalidConfig(
            f"codec is {extra['codec']!r:.80}; inside vLLM entries must be exact, since ordinary prompts "
            "use them, too: leave it out"
        )
    options = {f"chunk_{name}": extra[name] for name in _OPTIONS if name in extra}
    urls = tuple(_read(place, environment) for place in places)
    from kvmosaic.tiers import parse_tier_url

    for url in urls:
        parse_tier_url(url)
    return TierConfig(chunk_tier=urls, chunk_secret=environment.get(variable_of("chunk_secret")) or None, **options)


def _read(place: str, environment: Mapping[str, str]) -> str:
    if not place.startswith(FROM_VARIABLE):
        return place
    name = place.removeprefix(FROM_VARIABLE)
    url = environment.get(name)
    if not url:
        raise InvalidConfig(f"a tier is {place!r:.80}, but there is no variable {name!r:.80}; set it to a tier's URL")
    return url.strip()
