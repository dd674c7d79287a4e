"""Sampling fields of a request body that every API shares, with vLLM's names, and the form that an answer must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from kvmosaic.api.documents import CompanionsField, DocumentFields
from kvmosaic.api.fields import INTEGRAL, MAX_NAME, Body, Only, Plain, TokenId
from kvmosaic.config import MAX_PRIORITY
from kvmosaic.errors import InvalidRepair, InvalidSampling
from kvmosaic.layout import ChunkContext
from kvmosaic.layout.strategies import strategy_names
from kvmosaic.llm import LLM
from kvmosaic.prompt.segment import MAX_ADAPTER_CHARACTERS, DocumentsOrder
from kvmosaic.repair import FORMS, repair_policy
from kvmosaic.repair.policy import MAX_POLICY_CHARACTERS
from kvmosaic.sampling import DEFAULT_SINK_TOKENS, MAX_WINDOW_TOKENS, SamplingParams, StructuredOutputs
from kvmosaic.server.config_fields import Choices
from kvmosaic.web.errors import as_api_error

MAX_GRAMMAR = 2**17
MAX_CANDIDATES = 2**18
"""Maximum number of log probabilities in one reply; each takes a kilobyte until it is sent."""

MAX_ENDLESS_ANSWER = 2**20
"""Maximum tokens of an answer with `window_tokens`, which no position limits: they stay in memory until the answer
ends."""


class StructuredOutputFields(Body):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_schema: Annotated[
        Plain | Annotated[str, Field(max_length=MAX_GRAMMAR)] | None,
        Field(alias="json", description="A JSON schema, or one written as text."),
    ] = None
    json_object: bool | None = None
    regex: Annotated[str | None, Field(max_length=MAX_GRAMMAR)] = None
    choice: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_NAME)]] | None, Field(min_length=1, max_length=1_024)
    ] = None
    grammar: Annotated[str | None, Field(max_length=MAX_GRAMMAR)] = None
    structural_tag: Annotated[Any, Only((None,), "use a grammar")] = None

    def read(self) -> StructuredOutputs:
        """Returns the constraint on the answer.

        Raises:
            InvalidSampling: none of the fields, or several.
        """
        return StructuredOutputs(
            json=self.json_schema,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
        )


class StructuredFields(Body):
    """The form that the answer must have; each API adds its own field to it."""

    structured_outputs: StructuredOutputFields | None = None

    def structure(self) -> StructuredOutputs | None:
        """Returns the constraint on the answer; None for any text.

        Raises:
            InvalidSampling: a format given twice, or an unsupported one.
        """
        asked = self._format()
        if self.structured_outputs is None:
            return asked
        if asked is not None:
            raise InvalidSampling("the form of the answer is given twice; send response_format or structured_outputs")
        return self.structured_outputs.read()

    def _format(self) -> StructuredOutputs | None:
        return None


_PLAIN_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output",
    "window_tokens", "sink_tokens", "repair",
)  # fmt: skip


Defaults = Mapping[str, Any]
"""Defaults of sampling fields that a request omits."""

_BY_MODEL = "Default: what the model's generation_config.json says, or"


class GenerationFields(DocumentFields, StructuredFields):
    """What a request may say in every API: documents, form of the answer, and drawing."""

    model: Annotated[str | None, Field(max_length=4_096, description="A served model; may be left out.")] = None
    adapter: Annotated[
        str | None,
        Field(
            max_length=MAX_ADAPTER_CHARACTERS,
            description="The adapter (`--adapter`) that computes this prompt, or an empty text: the base model. "
            "Default: the first one where there are documents.",
        ),
    ] = None
    stream: bool | None = False
    temperature: Annotated[float | None, Field(ge=0, le=100, description=f"{_BY_MODEL} 1.")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description=f"{_BY_MODEL} 1.")] = None
    top_k: Annotated[
        int | None, Field(ge=-1, le=2**31 - 1, description=f"0 and -1 keep all tokens. {_BY_MODEL} 0."), INTEGRAL
    ] = None
    min_p: Annotated[float | None, Field(ge=0, le=1, description=f"{_BY_MODEL} 0.")] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100, description=f"{_BY_MODEL} 1.")] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1), INTEGRAL] = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=4_096)] = None
    ignore_eos: bool | None = False
    min_tokens: Annotated[int | None, Field(ge=0, le=2**27), INTEGRAL] = 0
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    window_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_WINDOW_TOKENS,
            description="Lets an answer go on without end in constant memory: a token sees system prompt, documents, "
            "`sink_tokens`, and this many newest tokens of question and answer. Default: it sees everything.",
        ),
        INTEGRAL,
    ] = None
    sink_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_WINDOW_TOKENS,
            description="First tokens of the question (or the plain prompt) that stay visible; only with "
            f"`window_tokens`, then {DEFAULT_SINK_TOKENS} by default.",
        ),
        INTEGRAL,
    ] = None
    priority: Annotated[
        int | None,
        Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Higher runs first; above 0 only with an admin's key."),
        INTEGRAL,
    ] = 0
    position_strategy: Annotated[
        Annotated[str, Choices(lambda: strategy_names(auto=True))] | None,
        Field(description="Positions of documents; default: the server's setting."),
    ] = None
    chunk_context: Annotated[
        ChunkContext | None,
        Field(
            description="What documents saw when they were computed: the system text; that and as many companions as "
            "there are documents before them; or nothing, so that they serve under any system text. Default: the "
            "server's setting, or companions where the request has some."
        ),
    ] = None
    companions: CompanionsField = None
    documents_order: Annotated[
        DocumentsOrder | None,
        Field(
            description="Order of the documents: as sent, or any: the cache chooses which come first, so that the "
            "fewest tokens are computed. Default: the server's setting."
        ),
    ] = None
    repair: Annotated[
        str | None,
        Field(
            max_length=MAX_POLICY_CHARACTERS,
            description="Which tokens of cached documents are computed again, now seeing the tokens before them: "
            f"{FORMS}. Default: the server's setting.",
            examples=["query(0.15)"],
        ),
    ] = None

    def sampling(
        self, defaults: Defaults, *, max_tokens: int | None, n: int = 1, logprobs: int | None = None
    ) -> SamplingParams:
        """Returns the sampling parameters; null counts as omitted, and `max_tokens` -1 is no limit.

        Raises:
            ApiError: 400, a repair that does not exist.
            InvalidSampling: values that do not go together, or an unsupported format.
        """
        most = None if max_tokens == -1 else max_tokens
        if self.repair is not None:
            _check_repair(self.repair)
        if self.window_tokens is not None and most is not None and most > MAX_ENDLESS_ANSWER:
            raise InvalidSampling(
                f"max_tokens is {most}; with window_tokens an answer has at most {MAX_ENDLESS_ANSWER} "
                "tokens: ask for fewer, and go on with another request"
            )
        given = {name: value for name in _PLAIN_SAMPLING if (value := getattr(self, name, None)) is not None}
        return SamplingParams(
            **{**defaults, **given},
            n=n,
            max_tokens=most,
            logprobs=logprobs,
            stop=self._stop_texts(),
            structured_outputs=self.structure(),
        )

    def _stop_texts(self) -> str | list[str] | None:
        return None


def _check_repair(repair: str) -> None:
    try:
        repair_policy(repair)
    except InvalidRepair as error:
        told = as_api_error(error)
        told.param = "repair"
        raise told from error


def prepared(llm: LLM, params: SamplingParams, num_prompts: int = 1, num_scored: int = 0) -> SamplingParams:
    """Returns the same parameters, with the response format compiled beside the engine.

    Without an explicit limit, an answer with a window is at most as long as one without: only an explicit request
    computes for an hour. `num_scored` tokens of the prompts have log probabilities, too.

    Raises:
        InvalidSampling: an unusable part of the format, or log probabilities that would exhaust the memory.
    """
    room = llm.engine.max_positions
    if params.window_tokens is not None:
        params = replace(params, max_tokens=params.max_tokens or min(room or MAX_ENDLESS_ANSWER, MAX_ENDLESS_ANSWER))
        room = None
    limits = [limit for limit in (params.max_tokens, room) if limit is not None]
    if params.logprobs is not None and limits:
        number = params.n * (num_prompts * min(limits) + num_scored) * (params.logprobs + 1)
        if number > MAX_CANDIDATES:
            raise InvalidSampling(
                f"the reply may hold {number} log probabilities, at most {MAX_CANDIDATES} are allowed; ask for fewer "
                "tokens (max_tokens), answers (n), or most likely tokens"
            )
    if params.structured_outputs is not None:
        grammars = llm.engine.grammars
        grammars.compile(params.structured_outputs)
    return params
