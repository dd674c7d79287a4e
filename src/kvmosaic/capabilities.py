"""What an engine may be unable to do with its model, and priorities of requests. No torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvmosaic.errors import InvalidPriority, InvalidPrompt, InvalidRepair, InvalidSampling, KVMosaicError, NotMovable

if TYPE_CHECKING:
    from kvmosaic.sampling import SamplingParams


MAX_PRIORITY = 100
"""Max absolute priority of a request."""


class Capability(StrEnum):
    """What an engine may be unable to do."""

    MOVE_KEYS = "move_keys"
    """Read a stored span at another position than the one it was computed at."""
    TEXTS = "texts"
    """Text segments before or between documents, which see everything before them."""
    WARM_UP = "warm_up"
    """Compute documents before a question asks for them."""
    FORK = "fork"
    """Several answers to one prompt (`n`)."""
    ROLLING_WINDOW = "rolling_window"
    """Texts without end (`window_tokens`)."""
    REPAIR = "repair"
    """Recompute tokens of documents with everything before them visible (`repair`)."""
    STRUCTURED_OUTPUT = "structured_output"
    """Answers that follow a schema or grammar (`structured_outputs`)."""
    LOGPROBS = "logprobs"
    """Log probabilities of the tokens of an answer (`logprobs`)."""


_ERRORS: dict[Capability, type[KVMosaicError]] = {
    Capability.MOVE_KEYS: NotMovable,
    Capability.REPAIR: InvalidRepair,
    Capability.TEXTS: InvalidPrompt,
}


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do with its model."""

    engine: str
    """Name of the engine, for errors: "transformers", "vllm"."""
    vocab_size: int
    max_positions: int | None = None
    """Maximum positions of a sequence; None: no limit."""
    missing: Mapping[Capability, str] = field(default_factory=dict)
    """Why it cannot do something, in words that fit after "because"."""

    def has(self, capability: Capability) -> bool:
        """Whether the engine can do something."""
        return capability not in self.missing

    def require(self, capability: Capability, wish: str) -> None:
        """Raises an error if the engine cannot do what a request wants.

        Args:
            capability: what is needed.
            wish: the setting that needs it, with its value: "window_tokens=512".

        Raises:
            NotMovable, InvalidRepair, InvalidPrompt, InvalidSampling: by kind of capability.
        """
        if reason := self.missing.get(capability):
            raise _ERRORS.get(capability, InvalidSampling)(
                f"{wish} needs {capability.value.replace('_', ' ')}, which {self.engine} cannot do here: {reason}"
            )

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidSampling or InvalidRepair if sampling parameters need what the engine cannot do."""
        wishes = {
            Capability.FORK: ("n", params.n, 1),
            Capability.ROLLING_WINDOW: ("window_tokens", params.window_tokens, None),
            Capability.STRUCTURED_OUTPUT: ("structured_outputs", params.structured_outputs, None),
            Capability.LOGPROBS: ("logprobs", params.logprobs, None),
        }
        for capability, (name, value, default) in wishes.items():
            if value != default:
                self.require(capability, f"{name}={value!r:.80}")
        if params.repair is not None and str(params.repair) != "none":
            self.require(Capability.REPAIR, f"repair={params.repair!s:.80}")


def check_priority(priority: object) -> int:
    """Returns the priority of a request, if it is valid.

    Raises:
        InvalidPriority: not a whole number between -100 and 100.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise InvalidPriority(
            f"the priority of a request is a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY} (0 by default, higher "
            f"runs first), got {priority!r:.80}"
        )
    return priority
