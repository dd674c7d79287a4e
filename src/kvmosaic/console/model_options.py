"""Model options of commands, and loading with a progress message."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmosaic.config import LLMConfig

if TYPE_CHECKING:
    from rich.console import Console

    from kvmosaic.llm import LLM


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model a command loads, and how."""

    model: str = "reader"
    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings by name, as options give them; the others have their defaults."""

    def config(self) -> LLMConfig:
        """The settings of the model.

        Raises:
            InvalidConfig: one of them cannot work.
        """
        from kvmosaic.console.cache.selection import secret_from
        from kvmosaic.tuned_settings import profile_choice

        tiers = tuple(self.values.get("chunk_tier") or ())
        return LLMConfig.from_values(
            {
                **self.values,
                "chunk_tier": tiers,
                "adapter": tuple(self.values.get("adapter") or ()),
                "chunk_secret": secret_from() if tiers else None,
                "profile": profile_choice(self.values.get("profile", "auto")),
            }
        )

    def changed(self, **values: Any) -> ModelOptions:
        """The same with other values."""
        return ModelOptions(self.model, {**self.values, **values})


def loading_text(model: str) -> str:
    """Returns the message while a model loads; with the size of a file, as loading takes some seconds per GB."""
    try:
        num_bytes = file.stat().st_size if (file := Path(model).expanduser()).is_file() else 0
    except (OSError, ValueError, RuntimeError):  # an invalid file name
        num_bytes = 0
    from kvmosaic.console.text import printable

    size = f", {num_bytes / 1e6:,.1f} MB" if num_bytes else ""
    return printable(f"loading {model}{size}")


def open_llm(opening: ModelOptions, notices: Console) -> LLM:
    """Loads the model; `notices` shows progress.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    with notices.status(loading_text(opening.model)), warnings.catch_warnings():
        from kvmosaic.llm import LLM
        from kvmosaic.model.quiet import quiet_libraries

        quiet_libraries()
        warnings.filterwarnings("ignore", "the chunk cache is off")  # reported below, in one line
        config = opening.config()
        llm = LLM(opening.model, **config.keywords())
    if llm.model.weights_note:
        notices.print(llm.model.weights_note, style="dim", markup=False, highlight=False)
    if llm.profile is not None:
        notices.print(llm.profile_note, style="dim", markup=False, highlight=False)
    if config.model.enable_chunk_cache and not llm.has_chunk_cache:
        notices.print(f"the chunk cache is off: {llm.chunk_cache_off_reason}", style="yellow", markup=False)
    return llm
