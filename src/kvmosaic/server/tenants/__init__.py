"""Tenants of a server: their API keys, quotas and rights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.server.tenants.access import AccessKey, Tenant, Tenants, current_admin, current_tenant

__all__ = ["AccessKey", "Tenant", "Tenants", "current_admin", "current_tenant"]

# Imported on first use, so that the settings, which read the format of keys, import no fastapi.
_HOMES = {"access": ("AccessKey", "Tenant", "Tenants", "current_admin", "current_tenant")}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
