"""Tenants: who asks. Each key belongs to one tenant, and tenants share nothing in the cache."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256

from fastapi import Request

from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.server.errors import ApiError
from kvmosaic.server.key_text import MAX_KEY_CHARACTERS


@dataclass(frozen=True, slots=True)
class Tenant:
    """A name under which documents and cached chunks are kept."""

    name: str
    quota_bytes: int | None = None
    """Most bytes of cached chunks; None: no limit of its own."""
    is_admin: bool = False
    """May see the metrics and the requests of all tenants, and let its own go before others."""
    weight: float = 1.0
    """How many times the share of another tenant it has, of whatever there is too little of."""


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A key, known by its SHA-256 only, and whose it is."""

    digest: bytes
    tenant: Tenant

    @classmethod
    def of(cls, key: str, tenant: Tenant) -> AccessKey:
        """Forgets the key itself."""
        return cls(sha256(key.encode()).digest(), tenant)


class Tenants:
    """Finds the tenant of a key. Without any key, everyone is the one tenant "default" and may do everything."""

    def __init__(self, keys: Iterable[AccessKey] = ()) -> None:
        self._keys = tuple(keys)
        self._open = Tenant(DEFAULT_TENANT, is_admin=True)

    @property
    def needs_key(self) -> bool:
        """Whether a request without a key is refused."""
        return bool(self._keys)

    def __iter__(self) -> Iterator[Tenant]:
        """All tenants, each once."""
        return iter(list({key.tenant.name: key.tenant for key in self._keys}.values()) or [self._open])

    def identify(self, authorization: str | None) -> Tenant:
        """The tenant whose key an Authorization header ("Bearer …") holds.

        Every key is compared, each in constant time, so that time tells nothing about any of them.

        Raises:
            ApiError: 401, no key or not one of ours.
        """
        if not self._keys:
            return self._open
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise _refused("no API key; send the header 'Authorization: Bearer <key>'")
        digest = sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = [known.tenant for known in self._keys if hmac.compare_digest(known.digest, digest)]
        if not found:
            raise _refused("this API key is not known here")
        return found[0]


async def current_tenant(request: Request) -> Tenant:
    """The tenant of a request: a FastAPI dependency. Access to the app was checked before any route runs."""
    tenant: Tenant = request.state.tenant
    return tenant


async def current_admin(request: Request) -> Tenant:
    """The tenant of a request that only an admin may make: a FastAPI dependency.

    Raises:
        ApiError: 403, another tenant.
    """
    tenant = await current_tenant(request)
    if not tenant.is_admin:
        raise ApiError(403, "only a key of an admin may see this", code="admin_only")
    return tenant


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
