"""Where documents stand if a request leaves it to the engine."""

from __future__ import annotations

from typing import Any, Literal

from kvmosaic.layout import AutoStrategy
from kvmosaic.layout import choose_strategy as choose_automatically

Placing = AutoStrategy
Strategy = Literal["auto", "sequential", "shared"]


def choose_strategy(strategy: Strategy, num_tokens: int, trained_positions: int | None) -> Placing:
    """The strategy that "auto" stands for (see `kvmosaic.layout.choose_strategy`); any other stands for itself.

    Args:
        strategy: as a request or a setting says.
        num_tokens: of the whole prompt.
        trained_positions: of the model; None: unknown, or no limit.
    """
    if strategy != "auto":
        return strategy
    return choose_automatically(num_tokens + 1, trained_positions)


def trained_positions(model_config: Any) -> int | None:
    """How many positions a model of vLLM was trained for, as its configuration says; None: it does not say.

    Not `max_model_len`, which vLLM computes: it may be less, or more where angles are scaled.
    """
    text = getattr(model_config, "hf_text_config", None)
    number = getattr(text, "max_position_embeddings", None)
    return number if isinstance(number, int) and number > 0 else None
