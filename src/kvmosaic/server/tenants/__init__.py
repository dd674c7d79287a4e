"""Tenants of a server: their API keys, quotas and rights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.server.tenants.access import AccessKey, Tenant, Tenants, current_admin, current_tenant

MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 1_024
KEY_RULE = (
    f"must be {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} printable ASCII characters without spaces, "
    "since it travels in a header"
)

# Imported on first use, so that the settings, which read the format of keys, import no fastapi.
_HOMES = {"access": ("AccessKey", "Tenant", "Tenants", "current_admin", "current_tenant")}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)


def is_key_text(key: object) -> bool:
    """Whether a value matches `KEY_RULE`."""
    if not isinstance(key, str) or not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
        return False
    return re.fullmatch(r"[!-~]+", key) is not None
