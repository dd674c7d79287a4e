"""What the documentation says of `kvmosaic warm`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from typer.main import get_command

from kvmosaic.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
LINES = [
    line.strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip().startswith("kvmosaic ") and "serve" not in line
]


def command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words name, and the other words."""
    found = get_command(app)
    while isinstance(found, click.Group):
        found, words = found.commands[words[0]], words[1:]
    return found, words


def test_commands_in_the_page_about_tiers_are_many() -> None:
    assert len(LINES) >= 1


@pytest.mark.parametrize("line", LINES)
def test_commands_in_the_page_about_tiers_can_be_read(line: str) -> None:
    found, words = command(shlex.split(line)[1:])
    found.make_context("kvmosaic", words)
