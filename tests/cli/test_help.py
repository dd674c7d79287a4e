from __future__ import annotations

import os
import re
import subprocess
import sys
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from typer import rich_utils
from typer.main import get_command
from typer.testing import CliRunner

from kvmosaic import __version__
from kvmosaic.cli import app
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.console.options import option_type
from kvmosaic.layout import ChunkContext
from kvmosaic.server.options import serve_app

COMMANDS = ("run", "plan", "check", "demo", "warm", "documents", "serve", "vllm")


def kvmosaic(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((sys.executable, "-m", "kvmosaic", *arguments), capture_output=True, text=True, check=False)


def test_help_comes_without_torch() -> None:
    code = (
        "import sys; from kvmosaic.cli import app\n"
        f"for words in {[[], *([command] for command in COMMANDS)]}:\n"
        "  try: app([*words, '--help'])\n"
        "  except SystemExit as done: print(words, done.code, {'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    output = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout
    assert output.count("Usage:") == len(COMMANDS) + 1
    assert output.count(" 0 set()\n") == len(COMMANDS) + 1, output


def every_command() -> list[tuple[str, ...]]:
    """The words of every command, those of groups as well; the group itself is among them."""
    found: list[tuple[str, ...]] = [()]
    waiting: list[tuple[tuple[str, ...], Any]] = [((), get_command(app))]
    while waiting:
        words, command = waiting.pop()
        for name, each in getattr(command, "commands", {}).items():
            found.append((*words, name))
            waiting.append(((*words, name), each))
    return found


def options_of(words: tuple[str, ...]) -> set[str]:
    command: Any = get_command(serve_app(lambda settings, read: None)) if words == ("serve",) else get_command(app)
    for name in () if words == ("serve",) else words:
        command = command.commands[name]
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    return {option for each in shown for option in (*each.opts, *each.secondary_opts) if option.startswith("--")}


@pytest.mark.parametrize("columns", [80, *(pytest.param(each, marks=pytest.mark.slow) for each in (120, 150))])
def test_no_line_of_a_help_text_is_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", columns)
    faults = []
    for words in every_command():
        result = CliRunner().invoke(app, [*words, "--help-all" if words == ("serve",) else "--help"])
        lines = result.stdout.splitlines()
        cut = [line for line in lines if len(line.rstrip()) > columns or "…  " in line or "… │" in line]
        missing = options_of(words) - set(re.findall(r"--[a-z0-9-]+", result.stdout))
        if result.exit_code or cut or missing:
            faults.append((words, result.exit_code, cut, missing))
    assert not faults


def test_the_help_of_the_server_fits_a_screen_and_names_what_shows_the_rest() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) <= 50 and max(map(len, lines)) <= 80
    assert sum(line.startswith("  --") for line in lines) == 16 and "--help-all" in result.stdout


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("kvmosaic wa", {"warm"}),
        ("kvmosaic serve --max-num", {"--max-num-seqs", "--max-num-batched-tokens"}),
        ("kvmosaic documents sh", {"show"}),
        ("kvmosaic run --chunk-con", {"--chunk-context"}),
    ],
)
def test_shell_completes_commands_and_options(typed: str, found: set[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_KVMOSAIC_COMPLETE": "complete_bash"}
    command = (sys.executable, "-c", "from kvmosaic.cli import main; main()")
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **words})
    assert set(result.stdout.split()) == found, result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_a_shell_is_shown(shell: str) -> None:
    code = "from kvmosaic.cli import main; main()"
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = (sys.executable, "-c", code, "--show-completion", shell)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0 and "_KVMOSAIC_COMPLETE" in result.stdout


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
