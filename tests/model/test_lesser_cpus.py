"""A CPU held to less than it has, by environment variables, is treated like one that has no more."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build
from support.programs import needs_extension
from typer.testing import CliRunner

from kvmosaic.attention.native import NativeBackend, load_library
from kvmosaic.cli import app
from kvmosaic.container import INSTRUCTION_SETS, ISA_VARIABLE, allowed_instruction_sets
from kvmosaic.errors import InvalidConfig
from kvmosaic.model import load_model
from kvmosaic.model.cpu.fused import RowKernels

VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", ISA_VARIABLE)
CPUINFO = Path("/proc/cpuinfo")
LOOK = """
import json, sys
import torch
from kvmosaic.attention import choose_backend
from kvmosaic.errors import InvalidConfig
from kvmosaic.model import load_model
from kvmosaic.model.cpu.fused import RowKernels

def refusal(**options):
    try:
        load_model(sys.argv[1], device="cpu", dtype="bfloat16", **options)
    except InvalidConfig as error:
        return str(error)

backend = choose_backend("native", torch.float32, torch.device("cpu")).backend
print(json.dumps({
    "dtype": str(load_model(sys.argv[1], device="cpu").dtype),
    "packed": load_model(sys.argv[1], device="cpu", dtype="bfloat16").is_prepacked,
    "always": refusal(prepack="always"),
    "native": backend.instruction_set,
    "rows": RowKernels().norm.__name__,
}))
"""
is_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only these CPUs have AVX2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build("llama", torch.bfloat16).save_pretrained(path)
    return path


def seen(folder: Path, **variables: str) -> Any:
    """What a process with these variables, and none of the others, makes of a checkpoint in bfloat16."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-W", "ignore", "-c", LOOK, str(folder)]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@is_x86
@needs_extension
def test_all_three_variables_make_a_machine_without_bfloat16(folder: Path) -> None:
    found = seen(folder, ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", KVMOSAIC_CPU_ISA="avx2")
    assert found.pop("always").endswith("torch has no oneDNN for bfloat16 here; use 'auto'")
    assert found == {"dtype": "torch.float32", "packed": False, "native": "avx2", "rows": "kvmosaic_norm_avx2"}


@is_x86
@needs_extension
@pytest.mark.parametrize("variables", [{"ATEN_CPU_CAPABILITY": "avx2"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}], ids=str)
def test_a_variable_of_torch_alone_is_enough_for_float32(folder: Path, variables: dict[str, str]) -> None:
    found = seen(folder, **variables)
    assert (found["dtype"], found["packed"]) == ("torch.float32", False)


@needs_extension
@pytest.mark.parametrize("name", allowed_instruction_sets())
def test_our_own_variable_is_read_when_a_model_is_loaded(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, name)
    if name not in load_library().instruction_sets:
        pytest.skip(f"this CPU has no {name}")
    assert NativeBackend().instruction_set == name
    assert RowKernels().norm.__name__ == f"kvmosaic_norm_{name}"
    if name != "avx512":
        assert load_model(folder, device="cpu").dtype is torch.float32
        assert not load_model(folder, device="cpu", dtype="bfloat16").is_prepacked


@is_x86
@needs_extension
@pytest.mark.skipif(not CPUINFO.exists(), reason="only Linux tells what the CPU has")
def test_without_the_variables_the_cpu_decides(folder: Path) -> None:
    flags = set(CPUINFO.read_text().split())
    has_kernels = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"} <= flags
    has_bfloat16 = has_kernels or "amx_tile" in flags
    found = seen(folder)
    assert found["dtype"] == ("torch.bfloat16" if has_bfloat16 else "torch.float32")
    assert found["native"] == ("avx512" if has_kernels else "avx2" if {"avx2", "fma"} <= flags else "portable")


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("", INSTRUCTION_SETS),
        ("auto", INSTRUCTION_SETS),
        ("avx512", INSTRUCTION_SETS),
        ("AVX2 ", ("portable", "avx2")),
        ("portable", ("portable",)),
    ],
)
def test_the_variable_allows_a_set_and_all_that_are_less(value: str, allowed: tuple[str, ...]) -> None:
    assert allowed_instruction_sets({ISA_VARIABLE: value}) == allowed
    assert allowed_instruction_sets({}) == INSTRUCTION_SETS


def test_an_unknown_value_is_an_error_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "KVMOSAIC_CPU_ISA is 'avx1024'; choose portable, avx2, avx512, or auto for the best that this CPU has"
    with pytest.raises(InvalidConfig, match=said):
        allowed_instruction_sets({ISA_VARIABLE: "avx1024"})
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())
