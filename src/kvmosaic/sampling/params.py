"""Sampling parameters: how tokens are sampled and when an answer ends, and the defaults that a model declares."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvmosaic.errors import InvalidSampling
from kvmosaic.repair import RepairPolicy, repair_policy
from kvmosaic.sampling.structured import CallGrammar, StructuredOutputs

MAX_ANSWERS = 256
MAX_TOKENS = 2**27
MAX_STOP_STRINGS = 128
MAX_STOP_CHARACTERS = 4_096
MAX_STOP_IDS = 4_096
MAX_BIASED = 1_024
MAX_LOGPROBS = 1_000
MAX_WINDOW_TOKENS = 2**27
DEFAULT_SINK_TOKENS = 4
FOLLOWED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields of a generation configuration that are used, as in vLLM."""

logger = logging.getLogger("kvmosaic")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled and when an answer ends, with vLLM's names and meanings.

    Two differences from vLLM: `max_tokens` is 256 by default (16 cuts most answers short), and there is no
    `prompt_logprobs` (the logits of reused tokens are never computed).
    """

    n: int = 1
    """Answers per prompt. They share the prompt's KV cache."""
    temperature: float = 1.0
    """Divides the logits; 0 always takes the most likely token (greedy)."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, measured against the most likely one; 0 keeps all."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs; answer i of n draws with seed + i."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer contains."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time that the answer contains the token."""
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    """Added to the logits of these token ids, -100 to 100, before penalties and temperature. Stored as pairs."""
    stop: str | Iterable[str] | None = None
    """Texts that end the answer; they are cut off. Stored as a tuple."""
    stop_token_ids: Iterable[int] | None = None
    """Token ids that end the answer. Stored as a tuple."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    max_tokens: int | None = 256
    """Max tokens of an answer; None: as many as the model has positions for, or 2**27 with `window_tokens`."""
    min_tokens: int = 0
    """No stop text, stop id or end-of-sequence token counts before this many tokens."""
    logprobs: int | None = None
    """Also return the log probabilities of the chosen token and of this many most likely ones: those of the model,
    before `logit_bias`, penalties and temperature."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop text (or the text of the stop id) in the answer."""
    window_tokens: int | None = None
    """Lets the answer continue without end in constant memory: a token sees `sink_tokens` and this many newest tokens
    of question and answer, besides system prompt and documents. None: a token sees everything, up to the model's
    limit."""
    sink_tokens: int | None = None
    """First tokens of the question (or the plain prompt) that stay visible; `DEFAULT_SINK_TOKENS` with a window."""
    repair: str | RepairPolicy | None = None
    """Tokens of cached documents to recompute, such as "query(0.15)"; None: the engine's default."""
    shown_special_token_ids: Iterable[int] | None = None
    """Special tokens that stay in the text in spite of `skip_special_tokens`, such as the tags of tool calls. Stored as
    a tuple."""
    structured_outputs: StructuredOutputs | CallGrammar | None = None
    """The required form of the answer; a mapping of its fields is accepted. A complete form ends the answer, also with
    `ignore_eos` and before `min_tokens`."""

    def __post_init__(self) -> None:
        _check_whole("n", self.n, 1, MAX_ANSWERS)
        _check_number("temperature", self.temperature, 0, 100, "0 is greedy, 1 leaves the probabilities as they are")
        _check_number("top_p", self.top_p, 0, 1, "1 keeps all tokens", above=True)
        _check_whole("top_k", self.top_k, -1, 2**31 - 1, "0 keeps all tokens")
        _check_number("min_p", self.min_p, 0, 1, "0 keeps all tokens")
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100, "1 changes nothing")
        _check_number("presence_penalty", self.presence_penalty, -2, 2, "0 changes nothing")
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2, "0 changes nothing")
        _check_whole("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.seed is not None:
            _check_whole("seed", self.seed, -(2**63), 2**63 - 1, "None draws differently every time")
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 1, MAX_TOKENS, "None allows all that the model has room for")
            if self.min_tokens > self.max_tokens:
                raise InvalidSampling(
                    f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; "
                    "lower the one or raise the other"
                )
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, "None returns no log probabilities")
        self._check_window()
        if self.repair is not None:
            repair_policy(self.repair)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSampling(f"{name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_dict(self.structured_outputs))
        elif not isinstance(self.structured_outputs, StructuredOutputs | CallGrammar | None):
            raise InvalidSampling(f"structured_outputs must be StructuredOutputs, got {self.structured_outputs!r:.80}")
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop", self.stop_token_ids))
        shown = _token_ids("shown_special", self.shown_special_token_ids)
        object.__setattr__(self, "shown_special_token_ids", shown)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> SamplingParams:
        """Builds parameters from names and values, for example of a JSON body.

        Raises:
            InvalidSampling: an unknown name, or a value outside its range.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(str(name) for name in settings if name not in known)
        if unknown:
            raise InvalidSampling(f"unknown sampling parameters {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(**settings)

    def _check_window(self) -> None:
        if self.window_tokens is not None:
            off = "None lets tokens see everything"
            _check_whole("window_tokens", self.window_tokens, 1, MAX_WINDOW_TOKENS, off)
            if self.sink_tokens is None:
                object.__setattr__(self, "sink_tokens", DEFAULT_SINK_TOKENS)
        elif self.sink_tokens is not None:
            raise InvalidSampling(
                f"sink_tokens is {self.sink_tokens!r} and there is no window_tokens; sinks stay while a window moves "
                "on: give window_tokens too, or leave sink_tokens out"
            )
        if self.sink_tokens is not None:
            _check_whole("sink_tokens", self.sink_tokens, 0, MAX_WINDOW_TOKENS, "0 keeps none")

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` as a mapping."""
        return dict(self.logit_bias or ())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set."""
        return frozenset(self.stop_token_ids or ())

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on previous tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check_whole(name: str, value: object, low: int, high: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidSampling(
            f"{name} must be a whole number between {low} and {high}, got {value!r}" + (f" ({hint})" if hint else "")
        )


def _check_number(name: str, value: object, low: float, high: float, hint: str, *, above: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        border = f"above {low} and at most {high}" if above else f"between {low} and {high}"
        raise InvalidSampling(f"{name} must be a number {border}, got {value!r} ({hint})")


def _stop_strings(stop: object) -> tuple[str, ...]:
    texts = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Iterable):
        raise InvalidSampling(f"stop must be a text or a list of texts, got {stop!r}")
    texts = tuple(texts)
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidSampling(f"stop has {len(texts)} texts; at most {MAX_STOP_STRINGS} are allowed")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidSampling(f"a stop text must have 1 to {MAX_STOP_CHARACTERS} characters, got {text!r:.80}")
    return tuple(dict.fromkeys(texts))


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise InvalidSampling(f"{name}_token_ids must be a list of token ids, got {ids!r}")
    numbers = tuple(ids)
    if len(numbers) > MAX_STOP_IDS:
        raise InvalidSampling(f"{name}_token_ids has {len(numbers)} ids; at most {MAX_STOP_IDS} are allowed")
    for number in numbers:
        _check_whole(f"a {name.replace('_', ' ')} token id", number, 0, 2**31 - 1)
    return tuple(dict.fromkeys(numbers))


def _logit_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(bias or ())
    except (TypeError, ValueError):
        raise InvalidSampling(f"logit_bias must map token ids to numbers, got {bias!r:.80}") from None
    if len(pairs) > MAX_BIASED:
        raise InvalidSampling(f"logit_bias has {len(pairs)} token ids; at most {MAX_BIASED} are allowed")
    for token_id, value in pairs.items():
        _check_whole("a token id of logit_bias", token_id, 0, 2**31 - 1)
        _check_number(f"logit_bias of token {token_id}", value, -100, 100, "0 changes nothing")
    return tuple(pairs.items())


def default_sampling(declared: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams()`, overridden by a model's generation configuration.

    An explicit `do_sample: false` means temperature 0, whatever the temperature beside it says, as in transformers.

    Args:
        declared: fields of the configuration; None is the same as an absent one. A value that `SamplingParams` would
            refuse is ignored with a log line: the model can be used without it.
    """
    usable: dict[str, Any] = {}
    for name in FOLLOWED:
        value = declared.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidSampling as error:
            logger.warning("the model's generation_config.json is not followed in one value: %s", error)
        else:
            usable[name] = value
    if declared.get("do_sample") is False:
        usable["temperature"] = 0.0
    return SamplingParams(**usable)
