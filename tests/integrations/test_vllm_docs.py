"""The page about vLLM against the code that it is about."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from kvmosaic.config import ENV_PREFIX, StoreConfig, settings_of
from kvmosaic.vllm import settings as ours
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.front import settings
from kvmosaic.vllm.front.command import MIDDLEWARE, serving
from kvmosaic.vllm.report_counters import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text()
SOURCE = ROOT / "src" / "kvmosaic" / "vllm"


def section(heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def first_column(text: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall("`([^`]+)`", row)}


def test_every_reason_of_a_bypass_is_explained_and_no_other() -> None:
    said = "".join(path.read_text() for path in (SOURCE / "scheduler").glob("*.py"))
    codes = set(re.findall(r'(?:Bypass|bypassed)\(\s*"(\w+)"', said))
    assert {"prefix_caching", "prompt_logprobs", "too_long"} <= codes
    assert first_column(section("What is bypassed")) - {"reason"} == codes


def test_every_metric_is_named_and_no_other() -> None:
    names = {family.name + ("_total" if family.kind == "counter" else "") for family in FAMILIES}
    assert first_column(section("The report and metrics")) == names


def test_every_variable_of_the_front_is_named_and_no_other() -> None:
    shared = {ours.REQUIRED_SETTING, "document_reads", *ours.SETTINGS}
    read = {*settings.PROMPT_SETTINGS, *settings_of(StoreConfig), *settings.FIELDS, *shared}
    named = {name.removeprefix(ENV_PREFIX).lower() for name in first_column(section("Requests")) if name.isupper()}
    assert named == read


def test_the_commands_by_hand_are_what_the_short_one_stands_for() -> None:
    added = serving(["Qwen/Qwen3-0.6B", "--max-model-len", "8192"], {}).arguments
    by_hand = next(line for line in PAGE.replace("\\\n", "").splitlines() if line.startswith("vllm serve"))
    for argument in added:
        assert argument.replace('": ', '":') in by_hand.replace('": ', '":')
    assert MIDDLEWARE in by_hand


def test_the_borders_of_the_page_can_be_read() -> None:
    import json

    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    body = json.loads(block)
    composition = Composition.from_params(body["kv_transfer_params"], len(body["prompt"]))
    assert composition is not None and composition.end == 6


def test_the_table_of_memory_is_current() -> None:
    spec = importlib.util.spec_from_file_location("vllm_memory", ROOT / "scripts" / "vllm_memory.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.HEADING in PAGE
    assert script.with_table(PAGE) == PAGE, "run python scripts/vllm_memory.py"
