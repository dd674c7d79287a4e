"""docs/vllm-models.md is what scripts/vllm_models.py writes for this vLLM, and true of the models that are run."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "vllm-models.md").read_text()
RUN = {
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Exaone4ForCausalLM"),
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "DeepseekV2ForCausalLM"),
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"),
}
"""What tests here compose."""


def written() -> str:
    spec = importlib.util.spec_from_file_location("vllm_models", ROOT / "scripts" / "vllm_models.py")
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    return str(script.table())


def test_the_table_is_current():
    of = re.search(r"source of vLLM (\S+), and", PAGE)
    assert of is not None
    if of[1] != version("vllm").split("+")[0]:
        pytest.skip(f"the table is of vLLM {of[1]}")
    assert written() == PAGE, "run .venv-vllm/bin/python scripts/vllm_models.py"


def test_models_that_the_tests_run_are_among_the_composed():
    composed = PAGE.partition("## Composes")[2].partition("## Depends")[0]
    listed = re.findall(r"^\| (`.*?) \|", composed, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(listed))) >= RUN
