from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "alerts.yml"
PAGE = (ROOT / "docs" / "server" / "metrics.md").read_text()
PROMTOOL = shutil.which("promtool")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert re.fullmatch(r"\d+m", rule["for"])
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 60


@pytest.mark.parametrize(
    ("alert", "limit"),
    [
        ("KVMosaicChunkHitRateLow", "< 0.5"),
        ("KVMosaicChunkCacheFull", "> 0.95"),
        ("KVMosaicRequestPoolFull", "> 0.95"),
        ("KVMosaicLookupSlow", "> 0.005"),
        ("KVMosaicAllocateSlow", "> 0.05"),
    ],
)
def test_the_limits_are_those_of_the_design(alert: str, limit: str) -> None:
    (rule,) = [rule for rule in rules() if rule["alert"] == alert]
    assert re.search(rf"{re.escape(limit)}\s*($|\n|and)", rule["expr"])


def test_the_page_lists_every_alert_and_no_other() -> None:
    assert re.findall(r"^\| `(KVMosaic\w+)` \|", PAGE, re.MULTILINE) == [rule["alert"] for rule in rules()]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_finds_the_rules_and_the_configuration_valid(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    config = (ROOT / "deploy" / "prometheus.yml").read_text().replace("/etc/prometheus/alerts.yml", str(RULES))
    (tmp_path / "prometheus.yml").write_text(config)
    subprocess.run([PROMTOOL, "check", "config", tmp_path / "prometheus.yml"], check=True, timeout=60)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
def test_alerts_fire_when_they_should_and_keep_quiet_otherwise(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    cases = (Path(__file__).parent / "alert_cases.yml").read_text().replace("RULES", str(RULES))
    (tmp_path / "cases.yml").write_text(cases)
    subprocess.run([PROMTOOL, "test", "rules", tmp_path / "cases.yml"], check=True, timeout=60)
