"""Vocabulary for llguidance: the bytes of every token, and masks of the allowed next tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
from numpy.typing import NDArray

from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling.grammar import Matcher

_MARK = "▁"
"""Represents a space in sentencepiece tokens."""


class Vocabulary:
    """The tokens of one model, prepared for grammars.

    The model may have more ids than the tokenizer (padding of the embedding) or fewer; ids without text and special
    tokens are never allowed. `allowed` is for one thread, everything else for any.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Reads the tokens.

        Args:
            tokenizer: a fast transformers tokenizer.
            vocab_size: V, the width of the logits.
            eos_token_ids: ids that end an answer; none: that of the tokenizer.

        Raises:
            InvalidSampling: a tokenizer whose tokens cannot be converted to bytes.
        """
        self.vocab_size = vocab_size
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if tokenizer is None:
            raise InvalidSampling("structured_outputs need a fast tokenizer, and this model has no tokenizer")
        if backend is None:
            raise InvalidSampling(
                f"structured_outputs need a fast tokenizer; this model has {type(tokenizer).__name__}, "
                "whose tokens are not known as bytes"
            )
        own = getattr(tokenizer, "eos_token_id", None)
        known = eos_token_ids or ([] if own is None else [own])
        ends = [token_id for token_id in known if token_id < vocab_size]
        if not ends:
            raise InvalidSampling("structured_outputs need an end-of-sequence token, and this model has none")
        size = max(vocab_size, len(tokenizer))
        self.eos_token_ids = tuple(ends)
        self._tokens = _read(tokenizer, backend, size, ends)
        size = self._tokens.vocab_size
        self.begins_with_space = np.array(
            [self._tokens.decode_bytes([token_id]).startswith(b" ") for token_id in range(size)]
        )
        self.drops_first_space = _drops_first_space(tokenizer, self.begins_with_space)
        self._executor: Any = None
        self._bits = np.zeros((1, -(-size // 32)), dtype=np.int32)

    def matcher(self, grammars: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> Any:
        """Creates an llguidance matcher at the beginning of the first of these grammars; check its `is_error`."""
        source = json.dumps({"grammars": list(grammars)}, ensure_ascii=False)
        return llguidance.LLMatcher(self._tokens, source, log_level=0, limits=llguidance.LLParserLimits(**limits))

    def allowed(self, matchers: Sequence[Matcher]) -> NDArray[np.bool_]:
        """Mask of the allowed next tokens, [R, V]; a row with none has its matcher's `failure` set."""
        followed = _followed(matchers)
        if len(followed) > len(self._bits):
            self._bits = np.zeros((2 * len(followed), self._bits.shape[1]), dtype=np.int32)
        bits = self._bits[: len(followed)]
        if len(followed) == 1:
            followed[0].unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        else:
            if self._executor is None:
                self._executor = llguidance.LLExecutor()
            rows = [(one, row) for row, one in enumerate(followed)]
            self._executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.shape[1] * 4, len(rows))
        return self._masks(matchers, followed, bits)

    def begin(self, matcher: Matcher) -> NDArray[np.bool_]:
        """Mask of the allowed first tokens, [V]; from any thread, in memory of its own."""
        followed = _followed([matcher])
        bits = np.zeros((len(followed), self._bits.shape[1]), dtype=np.int32)
        for one, row in zip(followed, bits, strict=True):
            one.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        row_of_masks: NDArray[np.bool_] = self._masks([matcher], followed, bits)[0]
        return row_of_masks

    def _masks(self, matchers: Sequence[Matcher], followed: list[Any], bits: NDArray[np.int32]) -> NDArray[np.bool_]:
        masks = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        masks = masks[:, : len(self.begins_with_space)]
        masks[[bool(one.is_error()) for one in followed]] = False
        behind_space = len(matchers)
        for row, matcher in enumerate(matchers):
            if matcher.spaced is not None:
                masks[row] = np.where(self.begins_with_space, masks[behind_space], masks[row])
                behind_space += 1
        allowed: NDArray[np.bool_] = masks[: len(matchers), : self.vocab_size]
        for row, matcher in enumerate(matchers):
            if not matcher.failure and not allowed[row].any():
                matcher.fail(matcher.plain.get_error() or "no token of the vocabulary fits")
        return allowed


def _followed(matchers: Sequence[Matcher]) -> list[Any]:
    """Matchers of llguidance: a row for each matcher, and after them one more for each at a first token."""
    return [matcher.plain for matcher in matchers] + [each.spaced for each in matchers if each.spaced is not None]


def _read(tokenizer: Any, backend: Any, size: int, ends: list[int]) -> Any:
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
    except ValueError as error:
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        if decoder.get("type") != "Metaspace" or decoder.get("replacement") != _MARK:
            raise InvalidSampling(f"structured_outputs cannot be used with this tokenizer: {error}") from None
    table = _Metaspace(tokenizer, backend, size, ends[0])
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(table), n_vocab=len(table.tokens), eos_token=ends)


class _Metaspace:
    """Sentencepiece tokens in the format that llguidance takes from other libraries.

        ids     [ tokens | padding | bytes that are no token ]
                 ---- V: what a model may choose ----

    Where only one text can follow, llguidance allows just its first token and assumes that there is one. So every text
    has tokens here, and where the model lacks them, no token is allowed.
    """

    def __init__(self, tokenizer: Any, backend: Any, size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        added = backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.tokens: list[bytes] = []
        for token_id in range(len(tokenizer)):
            text = backend.id_to_token(token_id) or ""
            is_text = token_id not in special
            self.tokens.append(text.replace(_MARK, " ").encode() if is_text else b"\xff" + text.encode())
        texts = {token for token_id, token in enumerate(self.tokens) if token_id not in special}
        self.tokens += [b""] * (size - len(self.tokens))
        self.tokens += [byte for number in range(256) if (byte := bytes([number])) not in texts]
        self.special_token_ids = sorted(special)
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens) if token and token_id not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str | bytes) -> list[int]:
        """The longest token at each offset: the tokenizer itself would prepend a space, which is wrong here."""
        rest = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        while rest:
            lengths = range(min(self._longest, len(rest)), 0, -1)
            length = next(length for length in lengths if rest[:length] in self._ids)
            ids.append(self._ids[rest[:length]])
            rest = rest[length:]
        return ids


def _drops_first_space(tokenizer: Any, begins_with_space: NDArray[np.bool_]) -> bool:
    """Whether the text of an answer lacks the space of its first token."""
    for token_id in map(int, begins_with_space[: len(tokenizer)].nonzero()[0][:8]):
        text = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not text.startswith(" "):
            return True
    return False
