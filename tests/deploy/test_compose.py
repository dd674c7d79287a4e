from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmosaic.config import ENV_PREFIX
from kvmosaic.server.process.listener import CLOSING_SECONDS
from kvmosaic.server.read import read_settings
from kvmosaic.server.settings import ServerSettings
from kvmosaic.tiers.tiered_store import PUT_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROVISIONING = DEPLOY / "grafana" / "provisioning"


def mounts() -> list[tuple[str, str]]:
    """(source, target) of every volume of every service."""
    found = []
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source, target = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[:2]
            found.append((source, target))
    return found


def test_there_are_a_server_prometheus_and_grafana() -> None:
    assert set(SERVICES) == {"kvmosaic", "prometheus", "grafana"}
    for service in SERVICES.values():
        assert service["restart"] == "unless-stopped"
        assert set(service.get("depends_on", [])) <= set(SERVICES)


@pytest.mark.parametrize("source", [source for source, _ in mounts()])
def test_what_is_mounted_exists(source: str) -> None:
    if source.startswith("."):
        assert (DEPLOY / source).exists()
    else:
        assert source in COMPOSE["volumes"]


def test_ports_are_published_on_loopback_only_and_once() -> None:
    published = [port for service in SERVICES.values() for port in service["ports"]]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    assert len(set(published)) == len(published) == 3


def test_images_of_others_have_a_version() -> None:
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


def test_the_image_is_built_from_the_repository() -> None:
    build = SERVICES["kvmosaic"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert (context / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    declared = set(re.findall(r"^ARG (\w+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    assert set(build["args"]) <= declared


def test_variables_of_the_server_are_settings_it_has() -> None:
    named = set(SERVICES["kvmosaic"]["environment"])
    named |= set(re.findall(rf"\b({ENV_PREFIX}\w+)=", (DEPLOY / "Dockerfile").read_text()))
    assert named >= {"KVMOSAIC_HOST", "KVMOSAIC_PORT", "KVMOSAIC_API_KEY"}
    named -= {"HF_TOKEN"}  # of the hub
    assert {name.removeprefix(ENV_PREFIX).lower() for name in named} <= set(ServerSettings.model_fields)


def test_settings_file_is_mounted_where_the_server_reads_it_and_it_can() -> None:
    target = dict(mounts())["./settings"]
    assert SERVICES["kvmosaic"]["environment"]["KVMOSAIC_CONFIG"] == f"{target}/server.yaml"
    settings = read_settings({"config": str(DEPLOY / "settings" / "server.yaml")})
    assert any(url.startswith("disk:/data/") for url in settings.tier_urls)
    assert f"# keys_file: {target}/keys.yaml" in (DEPLOY / "settings" / "server.yaml").read_text()


def test_the_server_has_time_to_drain_before_it_is_killed() -> None:
    grace = int(SERVICES["kvmosaic"]["stop_grace_period"].removesuffix("s"))
    assert grace > ServerSettings.model_fields["drain_seconds"].default + PUT_SECONDS + CLOSING_SECONDS


def test_prometheus_asks_the_server_where_it_listens_and_finds_the_alerts() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (targets,) = job["static_configs"]
    host, port = targets["targets"][0].split(":")
    assert job["job_name"] == "kvmosaic" and host in SERVICES
    assert any(published.endswith(f":{port}") for published in SERVICES[host]["ports"])
    assert f"KVMOSAIC_PORT={port}" in (DEPLOY / "Dockerfile").read_text()
    assert set(config["rule_files"]) <= {target for _, target in mounts()}


def test_grafana_finds_prometheus_and_the_board() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    host, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
    assert any(published.endswith(f":{port}") for published in SERVICES[host]["ports"])
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "kvmosaic.yml").read_text())["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in {target for _, target in mounts()}
    assert Path(home).parent == Path(provider["options"]["path"])
