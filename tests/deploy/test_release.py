"""The workflow that builds a release: its commands, as far as they can be read here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

WORKFLOW = Path(__file__).parents[2] / ".github" / "workflows" / "release.yml"


def test_each_platform_has_a_wheel_and_the_others_one_without_a_compiler() -> None:
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    compilers = {each["name"]: each["cc"] for each in job["strategy"]["matrix"]["include"]}
    assert compilers == {"linux-x86-64": "cc", "linux-arm64": "cc", "macos-arm64": "cc", "pure": "false"}
    commands = [step["run"] for step in job["steps"] if "run" in step]
    for command in commands:
        assert subprocess.run(("bash", "-n"), input=command, text=True).returncode == 0
    assert "kvmosaic[server] @ file://" in commands[-1] and "-c constraints.txt" in commands[-1]
