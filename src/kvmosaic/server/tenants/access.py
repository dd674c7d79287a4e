"""Tenants and their API keys: a key belongs to one tenant, and tenants share nothing in the cache."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256

from fastapi import Request
from starlette.datastructures import Headers

from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.errors import InvalidConfig
from kvmosaic.server.tenants import MAX_KEY_CHARACTERS
from kvmosaic.web.errors import ApiError


@dataclass(frozen=True, slots=True)
class Tenant:
    """Owner of documents and cached chunks."""

    name: str
    quota_bytes: int | None = None
    """Maximum bytes of cached chunks; None: no quota."""
    is_admin: bool = False
    """Whether it may read the metrics and requests of all tenants, and raise the priority of its own."""
    weight: float = 1.0
    """Its share of scarce resources, relative to the other tenants."""


@dataclass(frozen=True, slots=True)
class AccessKey:
    """An API key, stored as its SHA-256 only, with its tenant."""

    digest: bytes
    tenant: Tenant

    @classmethod
    def of(cls, key: str, tenant: Tenant) -> AccessKey:
        """Hashes a key; the key itself is not stored."""
        return cls(sha256(key.encode()).digest(), tenant)


def authorization_of(headers: Headers) -> str | None:
    """Returns the Authorization header of a request, or its x-api-key header in the same form."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")


class Tenants:
    """Maps keys to tenants. Without any key, all requests belong to the tenant "default", which may do everything."""

    def __init__(self, keys: Iterable[AccessKey] = ()) -> None:
        self._keys = tuple(keys)
        self._open = Tenant(DEFAULT_TENANT, is_admin=True)

    @property
    def needs_key(self) -> bool:
        """Whether a request without a key is refused."""
        return bool(self._keys)

    def replace(self, keys: Iterable[AccessKey]) -> None:
        """Takes other keys from now on; requests in progress keep their tenant.

        Raises:
            InvalidConfig: without any key where there were some, or the reverse, which changes what is checked besides.
        """
        new = tuple(keys)
        if bool(new) != self.needs_key:
            change = "removed" if self.needs_key else "added"
            raise InvalidConfig(f"all keys were {change}, which needs a restart")
        self._keys = new

    def __iter__(self) -> Iterator[Tenant]:
        """Yields all tenants, each once."""
        return iter(list({key.tenant.name: key.tenant for key in self._keys}.values()) or [self._open])

    def identify(self, authorization: str | None) -> Tenant:
        """Returns the tenant whose key an Authorization header ("Bearer …") holds.

        Compares every key, each in constant time, so that timing reveals nothing about any of them.

        Raises:
            ApiError: 401, no key, or an unknown one.
        """
        if not self._keys:
            return self._open
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise _refused("no API key; send the header 'Authorization: Bearer <key>' or 'x-api-key: <key>'")
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
