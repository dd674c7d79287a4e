"""Attacks on what configures the server: files and names that are not what they seem."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmosaic.errors import InvalidConfig
from kvmosaic.server.config_fields import MAX_FILE_BYTES, read_yaml
from kvmosaic.server.read import read_settings
from kvmosaic.server.tenants.keys import read_keys_file

ENTRY = "{key: sk-abcdefgh, tenant: acme, admin: %s}"


def file_of(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("value", ["2026-13-01", "2026-01-01 25:00:00", "9" * 5_000, "*nobody"])
def test_values_that_yaml_cannot_read_are_mistakes_not_crashes(tmp_path: Path, value: str) -> None:
    with pytest.raises(InvalidConfig, match="is not YAML"):
        read_yaml(file_of(tmp_path, f"port: {value}"))


def test_name_given_twice_is_not_decided_by_its_order(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="line 1 is not YAML"):
        read_keys_file(file_of(tmp_path, "- {key: sk-abcdefgh, admin: false, admin: true}"))


def test_key_that_is_an_admins_and_is_not_has_no_owner(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="with admin and without"):
        read_keys_file(file_of(tmp_path, f"- {ENTRY % 'true'}\n- {ENTRY % 'false'}"))
    assert len(read_keys_file(file_of(tmp_path, f"- {ENTRY % 'true'}\n- {ENTRY % 'true'}"))) == 2


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a device of Unix")
def test_endless_file_is_read_up_to_its_limit() -> None:
    with pytest.raises(InvalidConfig, match=f"more than {MAX_FILE_BYTES} bytes"):
        read_yaml(Path("/dev/zero"))


def test_file_name_with_a_nul_is_a_mistake_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot read"):
        read_yaml(Path("a\0b"))


def test_config_file_counts_whatever_the_case_of_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("kvmosaic_config", str(file_of(tmp_path, "port: 4321")))
    assert read_settings().port == 4321


@pytest.mark.parametrize("name", ["a\nb", "\udcff", "a\x1bb"])
def test_name_that_cannot_stand_in_a_reply_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="printable"):
        read_settings({"served_model_name": [name]})
