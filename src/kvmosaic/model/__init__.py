"""transformers models: loading, detection of their attention layers, and access to their attention."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.model.hook import ATTENTION_NAME, Receiver, attention_scope, install
    from kvmosaic.model.load import load_model
    from kvmosaic.model.loaded import LoadedModel

__all__ = ["ATTENTION_NAME", "LoadedModel", "Receiver", "attention_scope", "install", "load_model", "quiet_libraries"]

# Names are imported on first use: the command line reads the names of formats, and needs no torch for its help.
_HOMES = {
    "hook": ("ATTENTION_NAME", "Receiver", "attention_scope", "install"),
    "load": ("load_model",),
    "loaded": ("LoadedModel",),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)


def quiet_libraries() -> None:
    """Suppresses advice of transformers in a command's output; errors and the progress of downloads still appear."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
