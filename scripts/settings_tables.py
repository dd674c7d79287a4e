"""Writes the tables of settings into docs/server/running.md, from the fields of the settings.

python scripts/settings_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from kvmosaic.config import variable_of
from kvmosaic.server.options import panel_of
from kvmosaic.server.read import flag_of
from kvmosaic.server.settings import ServerSettings, is_variable_only

PAGE = Path(__file__).parents[1] / "docs" / "server" / "running.md"
HEADING = "| setting | default | what it is |\n|---|---|---|\n"


def tables() -> dict[str, str]:
    """Returns the rows of every panel, the model itself first."""
    fields = sorted(ServerSettings.model_fields.items(), key=lambda item: item[0] != "model")
    panels: dict[str, str] = {}
    for name, field in fields:
        label = variable_of(name) if is_variable_only(field) else flag_of(name)
        row = f"| `{label}` | {default_text(field.default)} | {field.description} |\n"
        panel = panel_of(field)
        panels[panel] = panels.get(panel, "") + row
    return panels


def default_text(default: object) -> str:
    """Returns a default as the tables show it."""
    if default in (None, (), ""):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def with_tables(text: str) -> str:
    """Returns the page with these tables."""
    for panel, rows in tables().items():
        pattern = re.compile(rf"(### {panel}\n\n{re.escape(HEADING)})(?:\|.*\n)*")
        text = pattern.sub(lambda match, rows=rows: match[1] + rows, text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
