"""Options of sampling for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvmosaic.console.options import SinkTokens, WindowTokens

if TYPE_CHECKING:
    from kvmosaic.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How answers are sampled, and how long they become."""

    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token every time.")] = 0.0
    window_tokens: WindowTokens = None
    sink_tokens: SinkTokens = None

    def params(self) -> SamplingParams:
        """The parameters of the requests."""
        from kvmosaic.sampling import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            window_tokens=self.window_tokens,
            sink_tokens=self.sink_tokens,
        )
