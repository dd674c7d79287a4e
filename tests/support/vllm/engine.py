"""vLLM as an inference engine: the engine protocol over a `vllm.LLM` of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import count
from typing import Any

from kvmosaic.engine.priorities import check_priority
from kvmosaic.errors import EngineStopped, InvalidPrompt, KVMosaicError, UnknownRequest
from kvmosaic.layout import ChunkContext, Layout, arrange, with_kin
from kvmosaic.prompt import Prompt, check_length
from kvmosaic.repair import WordFinder
from kvmosaic.sampling import (
    CallGrammar,
    CompletionOutput,
    Logprob,
    RequestOutput,
    ReuseReport,
    SamplingParams,
    SegmentReuse,
    StructuredOutputs,
)
from kvmosaic.sampling.reuse import segment_action
from kvmosaic.vllm.contract import FIELD, How, ModelFacts, composed
from kvmosaic.vllm.front.python_api import vllm_input, with_boundaries
from support.inference_engine import Capability, EngineCapabilities, InferenceEngine

_SAME_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)
"""Sampling parameters with the same name and meaning in vLLM."""


class VLLMRequest:
    """One prompt on its way through vLLM, with the newest output."""

    def __init__(self, request_id: str, prompt: Prompt, *, is_warm_up: bool) -> None:
        self.request_id = request_id
        self.is_finished = False
        self.error: KVMosaicError | None = None
        self._prompt = prompt
        self._is_warm_up = is_warm_up
        self._said: Any = None
        self._answers: dict[int, Any] = {}
        """By index: the newest output of each answer; one of vLLM's outputs may have only some."""

    def take(self, said: Any) -> None:
        """Takes a newer output of vLLM's."""
        self._said, self.is_finished = said, said.finished
        self._answers.update((answer.index, answer) for answer in said.outputs)

    def abort(self) -> None:
        """Ends it with what it has so far."""
        self.is_finished = True

    def output(self) -> RequestOutput:
        """The answers so far; the reuse report once it has finished, which is when vLLM tells."""
        token_ids = tuple(token for segment in self._prompt.segments for token in segment.token_ids or ())
        if self._said is None:
            return RequestOutput(self.request_id, self._prompt.text, token_ids, (), self.is_finished)
        answers = () if self._is_warm_up else [self._answers[index] for index in sorted(self._answers)]
        return RequestOutput(
            self.request_id,
            self._prompt.text,
            token_ids,
            tuple(_answer(each, is_aborted=self.is_finished) for each in answers),
            self.is_finished,
            _report(self._said, len(token_ids)),
        )


class VLLMEngine(InferenceEngine):
    """Runs prompts in a `vllm.LLM` that was created with `engine_arguments()`; its owner shuts it down.

    Steps of vLLM's are steps of this engine; vLLM's own methods must not be called in between. Documents and their
    positions are those of the plugin: see `kvmosaic.vllm`.
    """

    def __init__(
        self, llm: Any, *, position_strategy: str = "auto", chunk_context: str | None = None, repair: Any = None
    ) -> None:
        """Wraps an engine.

        Args:
            llm: a `vllm.LLM`.
            position_strategy: of requests that set none: "auto", "sequential" or "shared".
            chunk_context: of requests that set none: "system", "companions" or "none"; None: as in our own engine.
            repair: of requests that set none: "none" or "first(16)"; None: the plugin's default, where it can.

        Raises:
            InvalidConfig: a choice that vLLM does not support.
        """
        self._engine = llm.llm_engine
        self._how = How().updated(
            {"position_strategy": position_strategy, "chunk_context": chunk_context, "repair": repair}
        )
        config = self._engine.model_config
        self._facts = ModelFacts.of(config)
        missing = {
            Capability.ROLLING_WINDOW: "vLLM keeps every token of an answer",
        }
        if config.skip_tokenizer_init:
            missing[Capability.STRUCTURED_OUTPUT] = "this model has no tokenizer"
        self._capabilities = EngineCapabilities("vllm", config.get_vocab_size(), config.max_model_len, missing)
        self._has_tokenizer = not config.skip_tokenizer_init
        self._words_in = WordFinder(llm.get_tokenizer()) if self._has_tokenizer else None
        self._requests: dict[str, VLLMRequest] = {}
        self._names = (f"kvmosaic-{number}" for number in count())
        self._is_closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        """What vLLM can do with its model."""
        return self._capabilities

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request of this engine is unfinished."""
        return bool(self._requests)

    def arrange(
        self, prompt: Prompt, position_strategy: str | None = None, chunk_context: ChunkContext | None = None
    ) -> Layout:
        """Returns the layout of a tokenized prompt, without repair.

        Raises:
            InvalidPrompt: it does not fit the model.
            InvalidConfig: a strategy or context that vLLM does not support.
        """
        return self._arrange(prompt, self._how_for(position_strategy, chunk_context))

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
    ) -> VLLMRequest:
        """Queues a tokenized prompt; see `InferenceEngine.add_request`.

        A priority has an effect where vLLM was started with `scheduling_policy="priority"`.
        """
        self._capabilities.check(params)
        how = self._how_for(position_strategy, chunk_context, params.repair)
        return self._add(prompt, how, params, request_id, priority)

    def add_warm_up(self, prompt: Prompt, *, chunk_context: ChunkContext | None = None) -> VLLMRequest:
        """Queues the documents of a prompt; vLLM computes its question, too, and one token of an answer.

        Raises:
            InvalidPrompt: it has no documents, or does not fit.
        """
        if not prompt.chunks:
            raise InvalidPrompt("a warm-up needs at least one document; got none")
        params = SamplingParams(max_tokens=1, temperature=0, repair="none")
        how = self._how_for(None, chunk_context, "none")
        return self._add(prompt.without_texts(), how, params, None, 0, is_warm_up=True)

    def step(self) -> Sequence[VLLMRequest]:
        """Runs one step of vLLM's; returns the requests with new output."""
        if not self._requests:
            return []
        news = []
        for said in self._engine.step():
            request = self._requests.get(said.request_id)
            if request is not None:
                request.take(said)
                news.append(request)
                if request.is_finished:
                    del self._requests[request.request_id]
        return news

    def abort(self, request_id: str) -> None:
        """Ends a request now.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            raise UnknownRequest(f"no request {request_id!r} is under way; it may have finished already")
        self._engine.abort_request([request_id])
        request.abort()

    def close(self) -> None:
        """Aborts the requests of this engine and refuses further ones; vLLM goes on."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._is_closed = True

    def _how_for(self, position_strategy: str | None, chunk_context: str | None, repair: Any = None) -> How:
        wishes = {
            "position_strategy": position_strategy,
            "chunk_context": chunk_context,
            "repair": None if repair is None else str(repair),
        }
        return self._how.updated(wishes)

    def _arrange(self, prompt: Prompt, how: How) -> Layout:
        strategy, context = self._facts.placing(how, prompt.num_tokens)
        layout = arrange(with_kin(prompt), strategy, context)
        if self._capabilities.max_positions is not None:
            check_length(layout.last.end, self._capabilities.max_positions, 1)
        return layout

    def _add(
        self,
        prompt: Prompt,
        how: How,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        *,
        is_warm_up: bool = False,
    ) -> VLLMRequest:
        if self._is_closed:
            raise EngineStopped("the engine is closed; create a new VLLMEngine")
        if request_id in self._requests:
            raise InvalidPrompt(f"a request {request_id!r} is under way already; choose another request_id")
        self._arrange(prompt, how)
        ready = composed(prompt, how, self._facts, self._words_in)
        request = VLLMRequest(request_id or next(self._names), prompt, is_warm_up=is_warm_up)
        self._engine.add_request(
            request.request_id,
            vllm_input(ready, _salt(prompt)),
            with_boundaries(ready, _their_params(params, has_tokenizer=self._has_tokenizer)),
            priority=-check_priority(priority),  # vLLM runs the lowest first
        )
        self._requests[request.request_id] = request
        return request


def _salt(prompt: Prompt) -> str:
    """One salt for tenant and salt; different pairs have different ones."""
    return f"{len(prompt.tenant)}:{prompt.tenant}{prompt.salt}" if prompt.tenant else prompt.salt


def _their_params(params: SamplingParams, *, has_tokenizer: bool) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams

    given = {name: getattr(params, name) for name in _SAME_FIELDS}
    for name in ("stop", "stop_token_ids"):
        value = given[name]
        given[name] = value if value is None or isinstance(value, str) else list(value)
    if params.structured_outputs is not None:
        given["structured_outputs"] = _their_structure(params.structured_outputs)
    return VLLMSamplingParams(**given, logit_bias=params.biases or None, detokenize=has_tokenizer)


def _their_structure(structure: StructuredOutputs | CallGrammar) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if isinstance(structure, CallGrammar):
        return StructuredOutputsParams(grammar=structure.lark)
    given: Mapping[str, Any] = {field.name: getattr(structure, field.name) for field in fields(structure)}
    return StructuredOutputsParams(
        **{name: list(value) if name == "choice" else value for name, value in given.items() if value}
    )


def _answer(said: Any, *, is_aborted: bool) -> CompletionOutput:
    logprobs = None
    if said.logprobs is not None:
        logprobs = tuple(
            {token: Logprob(one.logprob, one.rank, one.decoded_token) for token, one in row.items()}
            for row in said.logprobs
        )
    return CompletionOutput(
        index=said.index,
        text=said.text,
        token_ids=tuple(said.token_ids),
        cumulative_logprob=said.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=said.finish_reason or ("abort" if is_aborted else None),
        stop_reason=said.stop_reason,
    )


def _report(said: Any, num_tokens: int) -> ReuseReport:
    """The plugin's report; for an ordinary prompt, one segment with the tokens that vLLM's prefix cache had."""
    told = (said.kv_transfer_params or {}).get(FIELD)
    if told is None:
        reused = min(said.num_cached_tokens or 0, num_tokens)
        action = segment_action(reused, num_tokens, distance=0)
        return ReuseReport((SegmentReuse("plain", num_tokens, action, reused_tokens=reused),))
    return ReuseReport(tuple(map(_segment, told["segments"])), composition=told["composition"])


def _segment(row: Mapping[str, Any]) -> SegmentReuse:
    """Reads a row of `SegmentReuse.to_reply`."""
    names = ("kind", "name", "action", "distance", "reused_tokens", "note", "tier")
    return SegmentReuse(num_tokens=row["tokens"], milliseconds=row["ms"], **{name: row[name] for name in names})
