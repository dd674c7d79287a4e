"""Quiet libraries: what transformers says while it loads, kept out of a command's output."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """Keeps progress bars and advice of transformers out of a command's output; errors still come through."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
