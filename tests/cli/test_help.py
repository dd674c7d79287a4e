from __future__ import annotations

import subprocess
import sys
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from kvmosaic import __version__
from kvmosaic.cli import app
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.console.option_groups import option_type
from kvmosaic.layout import ChunkContext

COMMANDS = ("run", "plan", "check", "demo", "warm", "cache", "documents", "serve", "vllm", "sleep", "wake")


def kvmosaic(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((sys.executable, "-m", "kvmosaic", *arguments), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), *((command,) for command in COMMANDS)])
def test_help_comes_without_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from kvmosaic.cli import app\n"
        f"try: app([*{arguments!r}, '--help'])\n"
        "except SystemExit as done: print(done.code, {'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    output = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout
    assert "Usage:" in output
    assert output.splitlines()[-1] == "0 set()"


def test_help_names_every_command() -> None:
    output = kvmosaic("--help").stdout
    assert all(f" {command} " in output for command in COMMANDS)


def test_version_is_one_line() -> None:
    assert kvmosaic("--version").stdout == f"kvmosaic {__version__}\n"


def test_nothing_asked_is_one_message_and_exit_code_2() -> None:
    result = kvmosaic("run", "reader")
    assert result.returncode == 2
    assert result.stderr.startswith("kvmosaic: nothing is asked; give --question")
    assert "Traceback" not in result.stderr


def test_prompt_text_and_documents_exclude_each_other() -> None:
    result = CliRunner().invoke(app, ["run", "reader", "a ## b ## c", "--question", "why?"])
    assert result.exit_code == 2
    assert "leave out --documents" in result.stderr


def test_unknown_strategy_is_refused_with_the_choices() -> None:
    result = CliRunner().invoke(app, ["run", "--question", "why?", "--position-strategy", "random"])
    assert result.exit_code == 2
    assert "shared" in result.stderr and "sequential" in result.stderr


def test_choices_are_those_of_the_settings() -> None:
    assert get_args(option_type("long_chunks"))[0] == get_type_hints(ChunkCacheConfig)["long_chunks"]
    assert choices_of(get_args(option_type("chunk_context"))[0]) == set(get_args(ChunkContext))


def choices_of(annotation: Any) -> set[str]:
    """The texts that an option may have, if it may also be left out."""
    kinds = [part for part in get_args(annotation) if part is not NoneType]
    assert len(kinds) == len(get_args(annotation)) - 1 == 1
    return set(get_args(kinds[0]))
