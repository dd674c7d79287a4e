"""Answer in progress: its tokens, its text so far, and whether it has ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from kvmosaic.sampling.output import CompletionOutput, FinishReason, Logprob
from kvmosaic.sampling.params import SamplingParams
from kvmosaic.sampling.sampler import SampledToken
from kvmosaic.sampling.stop_conditions import Finish, StopRules, StopStrings

_BROKEN = "�"
_MAX_HELD = 3
"""Half a UTF-8 character has at most 3 bytes, each shown as one replacement character."""
_PATIENCE = 16
"""Max tokens to wait for whole text; after that the text counts as broken."""
_WINDOW = 16
_LONGEST_WINDOW = 64
PART_TOKENS = 2**14
"""Max tokens decoded at once; takes some milliseconds."""


class Decoder(Protocol):
    """The part of a transformers tokenizer that this module needs."""

    @property
    def all_special_ids(self) -> Collection[int]:
        """Special ids, which are omitted from the text."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> object:
        """Decodes ids to text."""


def decode_all(
    tokenizer: Decoder | None,
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    part_tokens: int = PART_TOKENS,
) -> str:
    """Decodes a list of ids; empty text without a tokenizer.

    A long list is decoded in parts of `part_tokens`: one call for all of it would keep the interpreter's lock. Each
    part is decoded after some tokens of the previous one; if the boundary is ambiguous, the list is decoded as a whole.
    """
    if tokenizer is None or not token_ids:
        return ""

    def decode(begin: int, end: int) -> str:
        text = tokenizer.decode(
            list(token_ids[begin:end]), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    texts = [decode(0, part_tokens)]
    for begin in range(part_tokens, len(token_ids), part_tokens):
        before = decode(begin - _WINDOW, begin)
        both = decode(begin - _WINDOW, begin + part_tokens)
        if before.endswith(_BROKEN) or not before or not both.startswith(before) or not texts[-1].endswith(before):
            return decode(0, len(token_ids))
        texts.append(both.removeprefix(before))
    return "".join(texts)


def decoded_logprobs(tokenizer: Decoder | None, sampled: SampledToken) -> dict[int, Logprob]:
    """The log probabilities of a token that has one, and of the most likely ones beside it, each with its text."""
    assert sampled.logprob is not None
    ranked = [(sampled.token_id, sampled.logprob, sampled.rank)]
    ranked += [(token_id, value, rank) for rank, (token_id, value) in enumerate(sampled.top, start=1)]
    return {
        token_id: Logprob(value, rank, decode_all(tokenizer, [token_id], skip_special_tokens=False))
        for token_id, value, rank in ranked
    }


class Detokenizer:
    """Decodes one answer's token ids, one id at a time.

        ids      [ ...done... | window of a few tokens | ]
        text of the window:     [ emitted | held ]

    Each id decodes only a short window, so a long answer costs linear time. The window begins at a token where the text
    was whole, with some tokens before the new one, because decoders depend on neighbours (a leading space, `##`).
    Text that ends in half a character is held back until the rest is there. The concatenated pieces are the text of all
    ids decoded at once.
    """

    def __init__(
        self, tokenizer: Decoder | None, *, skip_special_tokens: bool = True, shown_ids: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        skipped = frozenset(tokenizer.all_special_ids) if tokenizer and skip_special_tokens else frozenset()
        self._skipped = skipped - frozenset(shown_ids)
        # Skipped ids never get into the window, so that the tokenizer need not skip any where some are shown.
        self._skip_special_tokens = skip_special_tokens and not shown_ids
        self._window: list[int] = []
        self._emitted = 0
        self._whole_ends: list[int] = []
        self._held = ""

    def append(self, token_id: int) -> str:
        """Takes the next id and returns the text that is final now; often a word, sometimes nothing."""
        if self._tokenizer is None or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        broken = len(text) - len(text.rstrip(_BROKEN))
        whole_end = self._whole_ends[-1] if self._whole_ends else 0
        if len(self._window) - whole_end > _PATIENCE:
            broken = min(broken, _MAX_HELD)
        certain = len(text) - broken
        new = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        self._held = text[self._emitted :]
        if not broken:
            self._whole_ends.append(len(self._window))
        if len(self._window) > (_LONGEST_WINDOW if broken else _WINDOW):
            self._shorten()
        return new

    def flush(self) -> str:
        """Returns held-back text: half a character at the end of an answer, as the replacement character."""
        held, self._held = self._held, ""
        self._emitted += len(held)
        return held

    def _shorten(self) -> None:
        """Drops old tokens from the window, up to a token where the text was whole."""
        half = _WINDOW // 2
        ends = [end for end in self._whole_ends if end <= len(self._window) - half]
        start = ends[-1] if ends else 0
        if not start and len(self._window) > _LONGEST_WINDOW:
            start = len(self._window) - half
        if start:
            self._window = self._window[start:]
            self._whole_ends = [end - start for end in self._whole_ends if end > start]
            self._emitted = len(self._decode(self._window)) - len(self._held)

    def _decode(self, token_ids: list[int]) -> str:
        return decode_all(self._tokenizer, token_ids, skip_special_tokens=self._skip_special_tokens)


class Answer:
    """One answer in progress: takes sampled tokens, gives text and the finish reason.

    After it has ended, `append` must not be called again.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Decoder | None = None,
        eos_token_ids: Collection[int] = (),
        *,
        index: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        """Begins an empty answer.

        Args:
            params: the sampling parameters.
            tokenizer: decodes ids; None gives empty text.
            eos_token_ids: the model's end-of-sequence tokens.
            index: index of the answer, below `n`.
            max_tokens: the engine's limit, if that is less than `params.max_tokens`.
        """
        self.params = params
        self.index = index
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        self.rules = StopRules(params, eos_token_ids, max_tokens)
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=tuple(params.shown_special_token_ids or ()),
        )
        self._text = StopStrings(params.stop_strings, keep=params.include_stop_str_in_output)
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    def append(self, sampled: SampledToken) -> Finish | None:
        """Adds a token; returns why the answer ended, or None while it continues."""
        assert self.finish is None, "the answer has ended"
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        self._keep_logprobs(sampled)
        by_id = self.rules.by_id(token_id, self.num_tokens)
        if sampled.is_last and token_id in self.rules.all_eos_token_ids:
            by_id = Finish("stop")  # whatever ignore_eos and min_tokens say: no token may follow
        search = self.num_tokens > self.rules.min_tokens
        # The token that ended the answer by its id is no text, unless it was requested.
        new = "" if by_id and not self.params.include_stop_str_in_output else self._detokenizer.append(token_id)
        ended = by_id or (Finish("stop") if sampled.is_last else self.rules.by_length(self.num_tokens))
        found = self._text.append(new + (self._detokenizer.flush() if ended else ""), search=search)
        self.finish = Finish("stop", found) if found is not None else ended
        return self.finish

    def end(self, reason: FinishReason) -> None:
        """Ends the answer now; an answer that has ended already stays as it is."""
        if self.finish is None:
            self._text.append(self._detokenizer.flush(), search=False)
            self.finish = Finish(reason)

    def take_text(self) -> str:
        """The final text that was not taken yet, for streaming."""
        return self._text.take(everything=self.finish is not None)

    def logprobs_from(self, first: int) -> list[dict[int, Logprob]] | None:
        """The log probabilities of the tokens from number `first` on; None unless they were requested."""
        return None if self._logprobs is None else self._logprobs[first:]

    def output(self) -> CompletionOutput:
        """The answer so far; its text is final."""
        shown = None if self.finish else self._text.num_shown
        return CompletionOutput(
            index=self.index,
            text=self._text.text[:shown],
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish.reason if self.finish else None,
            stop_reason=self.finish.stop_reason if self.finish else None,
        )

    def _keep_logprobs(self, sampled: SampledToken) -> None:
        if self._logprobs is None or sampled.logprob is None:
            return
        self._logprobs.append(decoded_logprobs(self._tokenizer, sampled))
        self._cumulative += sampled.logprob
