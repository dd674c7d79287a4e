"""Tokenization of text of mixed origin: untrusted text never becomes a control token."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from threading import Lock
from typing import Any, Protocol

from kvmosaic.container import check_cpu
from kvmosaic.prompt.text_pieces import TextPiece, foreign_intervals, joined

WINDOW_CHARACTERS = 2**14
"""Longer texts are counted in parts of this length before they are tokenized as a whole."""

_ORDINARY = re.compile(r"[\w\s▁]*")


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    is_fast: bool

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id; each has `content` and `special`."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Ids of the special tokens."""

    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]:
        """Tokenizes texts."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Renders messages."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and the character of the text at which each token starts (None if the tokenizer cannot say)."""

    token_ids: tuple[int, ...]
    starts: tuple[int, ...] | None


def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The model's control tokens, by id.

    All special tokens, and added tokens with any character that is not a letter, a digit or white space, such as
    `<tool_call>`. Added words, runs of spaces and single ASCII characters (a "." declared as padding) are vocabulary.
    """
    special = set(tokenizer.all_special_ids)
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if (token.special or token_id in special or not _ORDINARY.fullmatch(token.content))
        and not (len(token.content) == 1 and token.content.isascii())
    }


class PieceTokenizer:
    """Tokenizer of pieces as one text, where only trusted pieces can write control tokens.

    A fast tokenizer reports the characters of each token. If a control token was made from untrusted characters, the
    text is cut inside that token and the two sides are tokenized apart, until none is left:

        <|user|> How do I type <|end|> ?           <|end|> was typed by the user
        [<|user|> How do I type <] [|end|> ?]      cut after its first character

    Text without such tokens gives exactly the tokenizer's own result. `split_special_tokens` of transformers is not
    enough: it ignores added tokens that are not special (`<tool_call>`), and the origin of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        self.control_ids = frozenset(self._control)
        """Ids that untrusted text never becomes."""
        self._unknown = getattr(tokenizer, "unk_token_id", None)
        if self._unknown in (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
            self._unknown = None
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self._lock = Lock()
        # A fast tokenizer keeps settings of the last call; two threads must not change them at once.
        self.prefix, self.suffix = self._whole_prompt_tokens()

    def encode(self, pieces: Sequence[TextPiece]) -> Encoded:
        """Tokenizes pieces, without BOS and EOS of a whole prompt."""
        if not self._has_offsets:
            return self._encode_without_offsets(pieces)
        text, foreign = joined(pieces), foreign_intervals(pieces)
        ends = [end for _, end in foreign]
        done: dict[tuple[int, int], Tokens] = {}
        parts = [(0, len(text))]
        while True:
            missing = [part for part in parts if part not in done]
            done.update(zip(missing, self._tokenize(text, missing), strict=True))
            parts_after = [
                smaller for part in parts for smaller in (_cut(part, self._imitations(text, done[part], foreign, ends)))
            ]
            if parts_after == parts:
                break
            parts = parts_after
        ids = tuple(chain.from_iterable(done[part].ids for part in parts))
        return Encoded(ids, tuple(chain.from_iterable(done[part].starts for part in parts)))

    def far_longer(self, text: str, limit: int) -> int:
        """About how many tokens a text has, if it has at least twice as many as allowed, else 0; reads little more.

        Counts the tokens of parts of the text. At the cuts the count is a few tokens off, far less than the factor of
        two. A text of one part is never counted.
        """
        count = 0
        if len(text) <= WINDOW_CHARACTERS:
            return 0
        for start in range(0, len(text), WINDOW_CHARACTERS):
            check_cpu()
            count += len(self._ids(text[start : start + WINDOW_CHARACTERS]))
            if count > 2 * limit + WINDOW_CHARACTERS // 64:
                return count * len(text) // min(start + WINDOW_CHARACTERS, len(text))
        return 0

    def _tokenize(self, text: str, parts: list[tuple[int, int]]) -> Iterable[Tokens]:
        """The tokens of each part of a text."""
        if all(end - start <= PART_CHARACTERS for start, end in parts):
            return self._tokenize_at_once(text, parts)

        def tokenize(start: int, end: int) -> Tokens:
            return next(iter(self._tokenize_at_once(text, [(start, end)])))

        return [tokenize_long(tokenize, start, end) for start, end in parts]

    def _tokenize_at_once(self, text: str, parts: list[tuple[int, int]]) -> Iterable[Tokens]:
        check_cpu()
        if not parts:
            return []
        with self._lock:
            result = self._tokenizer(
                [text[start:end] for start, end in parts],
                add_special_tokens=False,
                split_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        return [
            Tokens.of(ids, spans, start)
            for (start, _), ids, spans in zip(parts, result["input_ids"], result["offset_mapping"], strict=True)
        ]

    def _imitations(
        self,
        text: str,
        tokens: Tokens,
        foreign: list[tuple[int, int]],
        ends: list[int],
    ) -> list[tuple[int, int]]:
        """Character spans of control tokens made, at least partly, from untrusted characters."""
        found: list[tuple[int, int]] = []
        if not foreign or self._control.keys().isdisjoint(tokens.ids):
            return found
        for token_id, start, end in zip(tokens.ids, tokens.starts, tokens.ends, strict=True):
            if token_id not in self._control:
                continue
            # Some tokens absorb the white space around them; that is no imitation.
            body = text[start:end].strip()
            start += text[start:end].find(body) if body else 0
            end = start + len(body) if body else end
            if token_id == self._unknown and body != self._control[token_id]:
                continue  # an unknown character, not a typed <unk>
            index = bisect_right(ends, start)
            if index < len(foreign) and foreign[index][0] < end:
                found.append((start, end))
        return found

    def _encode_without_offsets(self, pieces: Sequence[TextPiece]) -> Encoded:
        """For tokenizers written in Python: every piece separately, untrusted ones cut inside control tokens first."""
        literals = "|".join(re.escape(text) for text in sorted(self._control.values(), key=len, reverse=True) if text)
        ids: list[int] = []
        for piece in pieces:
            if piece.trusted or not literals:
                ids += self._ids(piece.text)
                continue
            cuts = [0, *(match.start() + 1 for match in re.finditer(f"(?={literals})", piece.text)), len(piece.text)]
            for start, end in pairwise(cuts):
                part = self._ids(piece.text[start:end])
                if not self._control.keys().isdisjoint(part):
                    single = [self._ids(character) for character in piece.text[start:end]]
                    part = [i for one in single for i in one if i not in self._control or i == self._unknown]
                ids += part
        return Encoded(tuple(ids), None)

    def _ids(self, text: str, *, whole: bool = False) -> list[int]:
        if not text:
            return []
        with self._lock:
            return list(self._tokenizer([text], add_special_tokens=whole, verbose=False)["input_ids"][0])

    def _whole_prompt_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that the tokenizer puts before and after a whole prompt (BOS, EOS)."""
        bare, whole = self._ids("a"), self._ids("a", whole=True)
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return (), ()


def _cut(part: tuple[int, int], imitations: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A part cut after the first character of each imitation; an imitation of one character is omitted."""
    start, last = part
    parts = []
    for left, right in imitations:
        if right - left > 1:
            parts.append((start, left + 1))
            start = left + 1
        else:
            parts.append((start, left))
            start = right
    parts.append((start, last))
    return [(left, right) for left, right in parts if left < right] if imitations else [part]


PART_CHARACTERS = 2**15
OVERLAP_CHARACTERS = 2**12
EDGE_CHARACTERS = 2**9
"""Characters at each end of an overlap where tokens may differ, because one of the parts is cut there."""


def _numbers() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Tokens:
    """Tokens of a text, with their character spans."""

    ids: array[int] = field(default_factory=_numbers)
    starts: array[int] = field(default_factory=_numbers)
    ends: array[int] = field(default_factory=_numbers)

    @classmethod
    def of(cls, ids: Iterable[int], spans: Iterable[tuple[int, int]], offset: int = 0) -> Tokens:
        """Tokens from a tokenizer's output; `offset` is added to its characters."""
        tokens = cls(array("q", ids))
        for start, end in spans:
            tokens.starts.append(offset + start)
            tokens.ends.append(offset + end)
        return tokens

    def between(self, first: int, last: int) -> tuple[bytes, bytes]:
        """Ids and starts of the tokens that begin in [first, last), for comparison."""
        begin, end = bisect_left(self.starts, first), bisect_left(self.starts, last)
        return self.ids[begin:end].tobytes(), self.starts[begin:end].tobytes()

    def join(self, later: Tokens, place: int) -> None:
        """Appends the tokens of a later part that begin at or after a character."""
        index, begin = bisect_left(self.starts, place), bisect_left(later.starts, place)
        for mine, its in ((self.ids, later.ids), (self.starts, later.starts), (self.ends, later.ends)):
            del mine[index:]
            mine.extend(its[begin:])


def tokenize_long(
    tokenize: Callable[[int, int], Tokens],
    start: int,
    end: int,
    *,
    part: int = PART_CHARACTERS,
    overlap: int = OVERLAP_CHARACTERS,
    edge: int = EDGE_CHARACTERS,
) -> Tokens:
    """Tokens of the characters [start, end) of a text.

    Args:
        tokenize: tokenizes a part of the text, from one character to another.
        start: the first character.
        end: one past the last character.
        part: characters per tokenizer call.
        overlap: common characters of two parts.
        edge: characters at both ends of an overlap that are not compared.
    """
    right = min(start + part, end)
    tokens = tokenize(start, right)
    while right < end:
        left = right - overlap
        later_right = min(left + part, end)
        later = tokenize(left, later_right)
        first, last = left + edge, right - edge
        common = tokens.between(first, last)
        if not common[0] or common != later.between(first, last):
            return tokenize(start, end)
        tokens.join(later, tokens.starts[bisect_left(tokens.starts, first)])
        right = later_right
    return tokens
