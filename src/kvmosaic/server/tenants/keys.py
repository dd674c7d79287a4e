"""API keys of the server: their tenants, quotas, weights and rights."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.config import parse_bytes
from kvmosaic.engine.shares import MAX_WEIGHT
from kvmosaic.errors import InvalidConfig
from kvmosaic.server.config_fields import nearest, read_yaml
from kvmosaic.server.tenants import KEY_RULE, is_key_text
from kvmosaic.server.tenants.access import AccessKey, Tenant

MAX_KEYS = 10_000
_FIELDS = ("key", "key_sha256", "tenant", "quota", "weight", "admin")
_TENANT_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def keys_of(keys: Iterable[str]) -> tuple[AccessKey, ...]:
    """Returns keys of the one tenant "default", which may do everything."""
    tenant = Tenant(DEFAULT_TENANT, is_admin=True)
    return tuple(AccessKey.of(key, tenant) for key in keys)


def read_keys_file(path: Path, others: tuple[AccessKey, ...] = ()) -> tuple[AccessKey, ...]:
    """Returns `others` and the keys of a file: a YAML list of mappings, one per key.

        - key: sk-a-long-random-text         # or key_sha256: its SHA-256 in hexadecimal
          tenant: acme                       # several keys may belong to one tenant
          quota: 512MiB                      # maximum memory for its cached documents; optional
          weight: 2                          # its share relative to others, where all want more; optional
          admin: false                       # may see the metrics and what other tenants do; optional

    Raises:
        InvalidConfig: names the entry by its number; no key is ever in the message.
    """
    content = read_yaml(path)
    if not isinstance(content, list) or not 0 < len(content) <= MAX_KEYS:
        raise InvalidConfig(f"{path} must be a list of 1 to {MAX_KEYS} entries, such as '- {{key: …, tenant: acme}}'")
    keys = list(others)
    for number, entry in enumerate(content, 1):
        try:
            keys.append(_key(entry))
        except InvalidConfig as error:
            raise InvalidConfig(f"{path}, entry {number}: {error}") from None
    _check_agree(keys, path)
    return tuple(keys)


def is_open_to_all(path: Path) -> bool:
    """Whether all users of this machine may read a file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def _key(entry: Any) -> AccessKey:
    if not isinstance(entry, dict):
        raise InvalidConfig("must be a mapping with a key and a tenant")
    if unknown := next((field for field in entry if field not in _FIELDS), None):
        raise InvalidConfig(f"no field is called {str(unknown)[:80]!r}{nearest(str(unknown), _FIELDS)}")
    return AccessKey(_digest(entry), _tenant(entry))


def _digest(entry: dict[str, Any]) -> bytes:
    key: Any = entry.get("key")
    digest: Any = entry.get("key_sha256")
    if (key is None) == (digest is None):
        raise InvalidConfig("give one of key and key_sha256")
    if digest is not None:
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            raise InvalidConfig("key_sha256 must be 64 hexadecimal digits, in quotes")
        return bytes.fromhex(digest)
    if not is_key_text(key):
        raise InvalidConfig(f"key {KEY_RULE}")
    return AccessKey.of(key, Tenant("")).digest


def _tenant(entry: dict[str, Any]) -> Tenant:
    name, quota, admin = entry.get("tenant", DEFAULT_TENANT), entry.get("quota"), entry.get("admin", False)
    if not isinstance(name, str) or not _TENANT_NAME.fullmatch(name):
        raise InvalidConfig(f"tenant must be 1 to 64 letters, digits or any of . _ : -, got {name!r:.80}")
    if not isinstance(admin, bool):
        raise InvalidConfig(f"admin must be true or false, got {admin!r:.80}")
    return Tenant(name, None if quota is None else parse_bytes(quota), admin, _weight(entry.get("weight", 1)))


def _weight(weight: Any) -> float:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidConfig(f"weight must be a number from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}, got {weight!r:.80}")
    return float(weight)


def _check_agree(keys: list[AccessKey], path: Path) -> None:
    """Checks that a key has one owner, and that the tenant's quota does not depend on the key."""
    owners: dict[bytes, Tenant] = {}
    quotas: dict[str, int | None] = {}
    weights: dict[str, float] = {}
    for key in keys:
        owner = owners.setdefault(key.digest, key.tenant)
        if owner.name != key.tenant.name:
            raise InvalidConfig(f"{path}: one key belongs to {owner.name!r} and to {key.tenant.name!r}")
        if owner.is_admin != key.tenant.is_admin:
            raise InvalidConfig(f"{path}: one key of tenant {owner.name!r} is given with admin and without; decide")
        if quotas.setdefault(key.tenant.name, key.tenant.quota_bytes) != key.tenant.quota_bytes:
            raise InvalidConfig(f"{path}: the keys of tenant {key.tenant.name!r} have different quotas; give one")
        if weights.setdefault(key.tenant.name, key.tenant.weight) != key.tenant.weight:
            raise InvalidConfig(f"{path}: the keys of tenant {key.tenant.name!r} have different weights; give one")
