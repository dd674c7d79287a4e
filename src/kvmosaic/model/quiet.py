"""Quiet libraries: suppresses messages of transformers in a command's output."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """Suppresses progress bars and advice of transformers in a command's output; errors still appear."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
