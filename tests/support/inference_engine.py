"""The face of an engine: our own, one that copies keys, and vLLM with the plugin have it, and pass the same cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvmosaic.capabilities import EngineCapabilities
from kvmosaic.errors import KVMosaicError
from kvmosaic.layout import ChunkContext, Layout
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import RequestOutput, SamplingParams


@runtime_checkable
class EngineRequest(Protocol):
    """One prompt on its way through an engine."""

    @property
    def request_id(self) -> str:
        """Its id."""

    @property
    def is_finished(self) -> bool:
        """Whether all output is there."""

    @property
    def error(self) -> KVMosaicError | None:
        """Why it failed, if it did."""

    def output(self) -> RequestOutput:
        """The answers so far, and the reuse report once the first token is there."""


@runtime_checkable
class InferenceEngine(Protocol):
    """An engine that answers prompts with cached documents; one thread calls it.

    A request that raises leaves the engine, and what it has cached, as they were. An answer is the same whether the
    documents of its prompt were cached or not, and whatever runs beside it.
    """

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do with its model."""

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished."""

    def arrange(
        self, prompt: Prompt, position_strategy: str | None = None, chunk_context: ChunkContext | None = None
    ) -> Layout:
        """Returns the layout in which it would run a tokenized prompt, without repair.

        Raises:
            InvalidPrompt: it does not fit the strategy or the model; see its subclasses.
            NotMovable: the layout moves keys, and the model does not allow that.
        """

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
    ) -> EngineRequest:
        """Queues a tokenized prompt: cached spans are read where they are, the others are computed and cached.

        Args:
            prompt: a prompt with token ids.
            params: sampling parameters.
            request_id: a name of your own; None generates one.
            priority: higher runs first, from -100 to 100.
            position_strategy: overrides the configured one.
            chunk_context: overrides the configured one.

        Raises:
            InvalidPrompt, NotMovable: see `arrange`; also a request_id that is under way.
            InvalidSampling, InvalidRepair: the parameters need what the engine cannot do; see `EngineCapabilities`.
            InvalidPriority: a priority outside its range.
        """

    def add_warm_up(self, prompt: Prompt, *, chunk_context: ChunkContext | None = None) -> EngineRequest:
        """Queues the uncached documents of a prompt, without an answer; its question is not used.

        Raises:
            InvalidPrompt: it has no documents, or does not fit; see its subclasses.
        """

    def step(self) -> Sequence[EngineRequest]:
        """Computes what it can in one forward; returns the requests with new output, an end or an error."""

    def abort(self, request_id: str) -> None:
        """Ends a request now, with what it has so far.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """

    def close(self) -> None:
        """Aborts everything and refuses further requests; calling it again is safe."""
