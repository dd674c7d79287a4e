"""The manifests of Kubernetes against its own schemas, and against the server and the image that they start."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvmosaic.config import ENV_PREFIX
from kvmosaic.server.middleware import OPEN_PATHS
from kvmosaic.server.process.listener import CLOSING_SECONDS
from kvmosaic.server.read import read_settings
from kvmosaic.server.settings import ServerSettings
from kvmosaic.tiers import parse_tier_url
from kvmosaic.tiers.tiered_store import PUT_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
KUSTOMIZE = DEPLOY / "kubernetes"
FOLDER = KUSTOMIZE / "base"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kvmosaic.yaml").read_text()))
MANIFESTS = {"kvmosaic": OBJECTS, "vllm": list(yaml.safe_load_all((DEPLOY / "vllm" / "kubernetes.yaml").read_text()))}
KUBERNETES = "1.34"
OVERLAYS = ("base", "gpu", "replicas")


def kind(name: str) -> list[dict[str, Any]]:
    return [each for each in OBJECTS if each["kind"] == name]


def stateful() -> dict[str, Any]:
    spec: dict[str, Any] = kind("StatefulSet")[0]["spec"]
    return spec


def container() -> dict[str, Any]:
    (found,) = stateful()["template"]["spec"]["containers"]
    return dict(found)


def kustomization(folder: Path = FOLDER) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return content


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_object_is_one_that_kubernetes_knows(name: str) -> None:
    for each in MANIFESTS[name]:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    broken = {**MANIFESTS[name][0], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_services_find_the_replicas() -> None:
    spec = stateful()
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    services = {each["metadata"]["name"]: each["spec"] for each in kind("Service")}
    assert services[spec["serviceName"]]["clusterIP"] == "None"
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    for service in services.values():
        assert service["selector"] == labels
        assert all(port["targetPort"] in ports and port["port"] == ports["http"] for port in service["ports"])
    assert f"KVMOSAIC_PORT={ports['http']}" in DOCKERFILE


def test_probes_ask_paths_that_need_no_key() -> None:
    paths = {name: container()[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")}
    assert paths == {"livenessProbe": "/livez", "readinessProbe": "/readyz"}
    assert set(paths.values()) <= OPEN_PATHS


def test_what_is_mounted_is_there_and_the_user_is_that_of_the_image() -> None:
    pod, spec = stateful()["template"]["spec"], stateful()
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in spec["volumeClaimTemplates"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert set(mounts) == volumes
    assert container()["securityContext"]["readOnlyRootFilesystem"]
    places = {mount["mountPath"] for mount in container()["volumeMounts"]}
    (home,) = re.findall(r"^WORKDIR (/home.*)$", DOCKERFILE, re.MULTILINE)
    assert {"/tmp", home} <= places, "where files are written besides the volumes"
    (declared,) = re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
    assert set(json.loads(declared)) == {mounts["data"], mounts["models"]}
    security = pod["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in DOCKERFILE
    assert security["fsGroup"] == security["runAsGroup"], "the volume belongs to the user of the server"


def test_settings_are_those_of_the_server() -> None:
    settings = read_settings({"config": str(FOLDER / "server.yaml")})
    (generator,) = kustomization()["configMapGenerator"]
    assert generator["files"] == ["server.yaml"]
    volume = next(each for each in stateful()["template"]["spec"]["volumes"] if each["name"] == "settings")
    assert volume["configMap"]["name"] == generator["name"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    variables = {each["name"]: each.get("value") for each in container()["env"]}
    assert variables["KVMOSAIC_CONFIG"] == f"{mounts['settings']}/server.yaml"
    own = {name.removeprefix(ENV_PREFIX).lower() for name in variables if name.startswith(ENV_PREFIX)}
    assert own <= set(ServerSettings.model_fields)
    assert f"XDG_DATA_HOME={mounts['data']} " in DOCKERFILE, "stored documents"
    assert "documents_dir:" not in (FOLDER / "server.yaml").read_text()
    folders = [url.removeprefix("disk:").split("?")[0] for url in settings.tier_urls if url.startswith("disk:")]
    assert folders and all(folder.startswith(f"{mounts['data']}/") for folder in folders)
    for url in settings.tier_urls:
        parse_tier_url(url)


def test_the_server_has_time_to_drain_before_it_is_killed() -> None:
    grace = stateful()["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > ServerSettings.model_fields["drain_seconds"].default + PUT_SECONDS + CLOSING_SECONDS


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_not_inside_of_what_it_is_made_from(name: str) -> None:
    """kubectl refuses that as a cycle."""
    for resource in kustomization(KUSTOMIZE / name)["resources"]:
        base = (KUSTOMIZE / name / resource).resolve()
        assert base.exists()
        assert base not in (KUSTOMIZE / name).resolve().parents


@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_builds_objects_that_kubernetes_knows(name: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    built = subprocess.run(
        ["kubectl", "kustomize", str(KUSTOMIZE / name)], capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    for each in objects:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    kinds = {each["kind"]: each for each in objects}
    (only,) = kinds["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    variables = [each["name"] for each in only["env"]]
    assert len(variables) == len(set(variables))
    assert (
        ("KVMOSAIC_DOCUMENTS_URL" in variables)
        == (name == "replicas")
        == (kinds["StatefulSet"]["spec"]["replicas"] > 1)
    )
    assert ("nvidia.com/gpu" in only["resources"]["limits"]) == (name == "gpu")
    settings = yaml.safe_load(kinds["ConfigMap"]["data"]["server.yaml"])
    assert set(settings) <= set(ServerSettings.model_fields)
    if name == "replicas":
        assert any(url.startswith("redis:") for url in settings["chunk_tier"]), "a tier that replicas share"


def test_image_is_named_once() -> None:
    assert [image["name"] for image in kustomization()["images"]] == [container()["image"]]


def test_keys_and_settings_that_are_reloaded_are_mounted_where_the_settings_look() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert f"# keys_file: {mounts['keys']}/keys.yaml" in (FOLDER / "server.yaml").read_text()
    assert f"keys_file: {mounts['keys']}/keys.yaml" in (DEPLOY.parent / "docs" / "server" / "running.md").read_text()


def test_recipe_of_the_published_image_builds_what_there_is() -> None:
    recipe = json.loads((DEPLOY / "docker-bake.json").read_text())
    (target,) = recipe["target"].values()
    assert recipe["group"]["default"]["targets"] == list(recipe["target"])
    assert (DEPLOY.parent / target["context"] / target["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert set(target["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    used = set(re.findall(r"\$\{(\w+)\}", json.dumps(target)))
    assert used == set(recipe["variable"])


def test_no_host_and_no_secret_is_written_down() -> None:
    for path in KUSTOMIZE.rglob("*.yaml"):
        assert not re.search(r"https?://", path.read_text()), path.name
    for each in container()["env"]:
        assert ("valueFrom" in each) == (each["name"].endswith(("_KEY", "_SECRET", "_TOKEN"))), each["name"]
