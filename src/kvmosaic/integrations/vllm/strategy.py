"""Position strategy of requests that leave it to the engine."""

from __future__ import annotations

from typing import Any

from kvmosaic.layout.strategies import AUTO, strategy_names
from kvmosaic.layout.strategies import choose_strategy as choose_automatically


def choices(*, auto: bool = True) -> tuple[str, ...]:
    """Strategies inside vLLM: without the ones that need an offset per document."""
    return strategy_names(auto=auto, offsets=False)


def choose_strategy(strategy: str, num_tokens: int, trained_positions: int | None) -> str:
    """Resolves "auto" (see `kvmosaic.layout.strategies`); returns any other strategy unchanged.

    Args:
        strategy: of the request or the settings.
        num_tokens: length of the whole prompt.
        trained_positions: max trained position of the model; None: unknown, or no limit.
    """
    if strategy != AUTO:
        return strategy
    return choose_automatically(num_tokens + 1, trained_positions)


def trained_positions(model_config: Any) -> int | None:
    """Max trained position of a vLLM model, from its configuration; None: not specified.

    Not `max_model_len`, which vLLM computes: it may be lower, or higher with scaled angles.
    """
    text = getattr(model_config, "hf_text_config", None)
    number = getattr(text, "max_position_embeddings", None)
    return number if isinstance(number, int) and number > 0 else None
