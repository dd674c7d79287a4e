from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from kvmosaic.errors import InvalidConfig
from kvmosaic.server.tenants import Tenants
from kvmosaic.server.tenants.keys import is_open_to_all, keys_of, read_keys_file
from kvmosaic.web.errors import ApiError

SECRET = "sk-nobody-may-read-this"


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_and_their_hashes_are_the_same(tmp_path: Path) -> None:
    digest = sha256(SECRET.encode()).hexdigest()
    for entry in (f"key: {SECRET}", f"key_sha256: {digest}", f"key_sha256: {digest.upper()}"):
        tenants = Tenants(
            read_keys_file(written(tmp_path, f"- {{{entry}, tenant: acme, quota: 1GiB, weight: 2.5, admin: true}}"))
        )
        tenant = tenants.identify(f"Bearer {SECRET}")
        assert (tenant.name, tenant.quota_bytes, tenant.weight, tenant.is_admin) == ("acme", 2**30, 2.5, True)


def test_entry_needs_only_a_key(tmp_path: Path) -> None:
    (key,) = read_keys_file(written(tmp_path, f"- key: {SECRET}"))
    assert (key.tenant.name, key.tenant.quota_bytes, key.tenant.is_admin) == ("default", None, False)


def test_keys_of_the_file_come_on_top(tmp_path: Path) -> None:
    keys = read_keys_file(written(tmp_path, f"- {{key: {SECRET}, tenant: acme}}"), keys_of(["another-key"]))
    tenants = Tenants(keys)
    assert tenants.identify("Bearer another-key").is_admin
    assert not tenants.identify(f"Bearer {SECRET}").is_admin


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a list of 1 to 10000 entries"),
        ("[]", "must be a list of 1 to 10000 entries"),
        (f"key: {SECRET}", "must be a list"),
        (f"- {SECRET}", "entry 1: must be a mapping"),
        ("- tenant: acme", "entry 1: give one of key and key_sha256"),
        (f"- {{key: {SECRET}, key_sha256: {'0' * 64}}}", "entry 1: give one of key and key_sha256"),
        (f"- {{key: {SECRET}, tenat: acme}}", "entry 1: no field is called 'tenat'; did you mean 'tenant'"),
        (f"- {{key: {SECRET}}}\n- {{key: short}}", "entry 2: key must be 8 to 1024 printable"),
        (f"- {{key: {SECRET} x}}", "entry 1: key must be"),
        (f"- {{key: [{SECRET}]}}", "entry 1: key must be"),
        (f"- {{key_sha256: {SECRET}}}", "entry 1: key_sha256 must be 64 hexadecimal digits"),
        (f"- {{key: {SECRET}, tenant: 'a b'}}", "entry 1: tenant must be 1 to 64 letters"),
        (f"- {{key: {SECRET}, quota: much}}", "entry 1: 'much' is not a size"),
        (f"- {{key: {SECRET}, quota: 0}}", "entry 1: a size must be"),
        (f"- {{key: {SECRET}, weight: 0}}", "entry 1: weight must be a number from 0.001 to 1000, got 0"),
        (f"- {{key: {SECRET}, weight: .nan}}", "entry 1: weight must be a number"),
        (f"- {{key: {SECRET}, weight: true}}", "entry 1: weight must be a number"),
        (f"- {{key: {SECRET}, weight: much}}", "entry 1: weight must be a number"),
        (f"- {{key: {SECRET}, weight: 2}}\n- {{key: {SECRET}-2, weight: 1}}", "have different weights; give one"),
        (f"- {{key: {SECRET}, admin: maybe}}", "entry 1: admin must be true or false"),
        (f"- {{key: {SECRET}, tenant: a}}\n- {{key: {SECRET}, tenant: b}}", "one key belongs to 'a' and to 'b'"),
        (f"- {{key: {SECRET}1, quota: 1}}\n- {{key: {SECRET}2, quota: 2}}", "have different quotas"),
        (f"- {{key: {SECRET}", "is not YAML"),
    ],
)
def test_mistakes_are_named_without_the_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_keys_file(written(tmp_path, text))
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)


def test_without_keys_everyone_is_the_admin_of_one_tenant() -> None:
    tenant = Tenants().identify(None)
    assert (tenant.name, tenant.is_admin) == ("default", True)
    assert list(Tenants()) == [tenant]


def test_with_keys_nobody_comes_in_without_one() -> None:
    with pytest.raises(ApiError, match="no API key"):
        Tenants(keys_of([SECRET])).identify(None)


def test_a_file_that_everybody_may_read_is_known(tmp_path: Path) -> None:
    path = written(tmp_path, f"- key: {SECRET}")
    path.chmod(0o600)
    assert not is_open_to_all(path)
    path.chmod(0o644)
    assert is_open_to_all(path)
    assert not is_open_to_all(tmp_path / "missing.yaml")
