"""Answer in progress: its tokens, its text so far, and whether it has ended."""

from __future__ import annotations

from collections.abc import Collection

from kvmosaic.sampling.detokenizer import Decoder, Detokenizer, decode_all
from kvmosaic.sampling.output import CompletionOutput, FinishReason, Logprob
from kvmosaic.sampling.params import SamplingParams
from kvmosaic.sampling.sampler import SampledToken
from kvmosaic.sampling.stop_conditions import Finish, StopRules, StopStrings


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
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
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
        ranked = [(sampled.token_id, sampled.logprob, sampled.rank)]
        ranked += [(token_id, value, rank) for rank, (token_id, value) in enumerate(sampled.top, start=1)]
        self._logprobs.append(
            {
                token_id: Logprob(value, rank, decode_all(self._tokenizer, [token_id], skip_special_tokens=False))
                for token_id, value, rank in ranked
            }
        )
        self._cumulative += sampled.logprob
