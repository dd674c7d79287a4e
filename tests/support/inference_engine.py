"""The face of an engine: our own, one that copies keys, and vLLM with the plugin have it, and pass the same cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from kvmosaic.engine import Engine
from kvmosaic.errors import InvalidPrompt, InvalidRepair, InvalidSampling, KVMosaicError, NotMovable
from kvmosaic.layout import ChunkContext, Layout
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import RequestOutput, SamplingParams


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


def capabilities_of(engine: Any) -> EngineCapabilities:
    """What an engine can do with its model; the reasons of ours are those of the errors that requests get."""
    if not isinstance(engine, Engine):
        return engine.capabilities
    model = engine.runner.model
    missing = {
        Capability.MOVE_KEYS: "" if model.is_movable else model.immovable_reason,
        Capability.ROLLING_WINDOW: model.no_window_reason,
        Capability.REPAIR: model.no_repair_reason or model.state_text,
        Capability.STRUCTURED_OUTPUT: "" if model.tokenizer is not None else "this model has no tokenizer",
    }
    missing = {capability: reason for capability, reason in missing.items() if reason}
    return EngineCapabilities(model.engine_name, model.vocab_size, engine.max_positions, missing)


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
