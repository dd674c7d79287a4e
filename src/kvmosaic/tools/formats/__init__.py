"""Tool-call formats, by name."""

from __future__ import annotations

from typing import Final

from kvmosaic.tools.formats.json_formats import Granite, Hermes, Json, Llama3, Mistral, MistralArgs
from kvmosaic.tools.formats.token_formats import DeepSeekV3, DeepSeekV31, Harmony, Qwen3Coder
from kvmosaic.tools.formats.tool_format import ToolFormat, shows_tools

__all__ = ["TOOL_FORMATS", "ToolFormat", "detect_tool_format", "shows_tools"]

TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    each.name: each
    for each in (
        Harmony(),
        DeepSeekV3(),
        DeepSeekV31(),
        MistralArgs(),
        Mistral(),
        Granite(),
        Qwen3Coder(),
        Hermes(),
        Llama3(),
        Json(),
    )
}
"""In the order in which a chat template is compared with them: the more special ones first."""


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format in which a chat template writes calls; None if it shows tools, and it is none of the known ones."""
    return next((each for each in TOOL_FORMATS.values() if each.is_used_by(template)), None)
