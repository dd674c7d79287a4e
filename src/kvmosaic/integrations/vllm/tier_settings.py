"""Tier settings of a vLLM engine, from `kv_connector_extra_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvmosaic.config import TierConfig
from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers import parse_tier_url

SECRET_VARIABLE = "KVMOSAIC_CHUNK_SECRET"  # noqa: S105  the name of a variable
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
    for url in urls:
        parse_tier_url(url)
    return TierConfig(chunk_tier=urls, chunk_secret=environment.get(SECRET_VARIABLE) or None, **options)


def _read(place: str, environment: Mapping[str, str]) -> str:
    if not place.startswith(FROM_VARIABLE):
        return place
    name = place.removeprefix(FROM_VARIABLE)
    url = environment.get(name)
    if not url:
        raise InvalidConfig(f"a tier is {place!r:.80}, but there is no variable {name!r:.80}; set it to a tier's URL")
    return url.strip()
