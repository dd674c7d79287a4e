"""Index of stored texts by their content: which of them are part of a prompt, found in one pass over it.

    stored   "The tower of Fenbury is forty metres high, and older than the town."
                                 |-- anchor: 32 characters --|
    prompt   "... Context: The tower of Fenbury is forty metres high, and older than the town. How high ..."

Each text has one anchor. The hashes of all windows of 32 characters of a prompt are computed together and looked up;
where an anchor is found, the digest of the whole text is compared. The texts themselves are not kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvmosaic.prompt.found_documents import MIN_FOUND_CHARACTERS

ANCHOR_CHARACTERS = MIN_FOUND_CHARACTERS
MAX_SAME_ANCHOR = 16
"""Maximum texts with one anchor; a text whose possible anchors are all taken so often is not found."""
_WORDS = 2**64
_MIN_SLOTS = 2**16
_SLOTS_PER_TEXT = 16
_COMPARED_PER_CHARACTER = 16
"""Budget of compared characters for each character of a prompt; the search ends when it is used up."""
_COMPARISON = 256
"""What a comparison costs besides, in characters."""
_WINDOWS = 2**20
"""Windows that are hashed together."""

Hashes = NDArray[np.uint64]


class TextIndex:
    """Texts by an anchor in each; adding and removing one is O(1), a search linear in the length of the prompt.

    One thread at a time adds and removes. Others may search meanwhile: they find each text as it was before or after.

    The hash is a polynomial with a random base for each index, so that no text can be made to collide with others.
    """

    def __init__(self) -> None:
        """Creates an empty index."""
        self._base = secrets.randbits(64) | 1
        self._key = secrets.token_bytes(16)
        self._texts: dict[str, tuple[int, int, int, bytes]] = {}
        """By id: hash of the anchor, its place in the text, and length and digest of the text."""
        self._by_hash: dict[int, list[str]] = {}
        self._is_slot_used = np.zeros(_MIN_SLOTS, dtype=bool)
        """By the highest bits of a hash: whether a text may have that hash. Slots of removed texts stay used."""

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text_id: str, text: str) -> None:
        """Adds a text, or replaces the one with its id; a text shorter than an anchor is not found."""
        self.remove(text_id)
        last = len(text) - ANCHOR_CHARACTERS
        if last < 0:
            return
        places = dict.fromkeys((0, last // 2, last, last // 4, 3 * last // 4))
        anchors = ((self._hash(text[place : place + ANCHOR_CHARACTERS]), place) for place in places)
        best: tuple[int, int, int] | None = None
        for anchor, place in anchors:
            count = len(self._by_hash.get(anchor, ()))
            best = min(best or (count, anchor, place), (count, anchor, place), key=lambda each: each[0])
            if not count:
                break
        assert best is not None
        count, anchor, place = best
        if count >= MAX_SAME_ANCHOR:
            return
        self._texts[text_id] = anchor, place, len(text), self._digest(text)
        self._by_hash.setdefault(anchor, []).append(text_id)
        if len(self._texts) * _SLOTS_PER_TEXT > len(self._is_slot_used):
            self._grow()
        self._is_slot_used[anchor >> _shift(self._is_slot_used)] = True

    def remove(self, text_id: str) -> None:
        """Removes a text, if it is there."""
        if (known := self._texts.pop(text_id, None)) is None:
            return
        ids = self._by_hash[known[0]]
        ids.remove(text_id)
        if not ids:
            del self._by_hash[known[0]]

    def find(self, text: str) -> list[tuple[int, int, str]]:
        """The texts that are part of a text: (start, end, id), in order, without overlap.

        Where several begin at the same place, the longest counts; where they overlap, the first.
        """
        left = _COMPARED_PER_CHARACTER * len(text) + 2**16
        found, end = list[tuple[int, int, str]](), 0
        matches = list[tuple[int, int, str]]()
        for start, end_of_it, digest, text_id in self._candidates(text):
            left -= end_of_it - start + _COMPARISON
            if left < 0:
                break
            if self._digest(text[start:end_of_it]) == digest:
                matches.append((start, end_of_it, text_id))
        for match in sorted(matches, key=lambda match: (match[0], -match[1])):
            if match[0] >= end:
                found.append(match)
                end = match[1]
        return found

    def _candidates(self, text: str) -> Iterator[tuple[int, int, bytes, str]]:
        """Where a text may be whose anchor is in a prompt: its start and end, its digest, and its id."""
        for offset in range(0, len(text), _WINDOWS) if self._texts else ():
            hashes = self._window_hashes(text[offset : offset + _WINDOWS + ANCHOR_CHARACTERS - 1])
            is_slot_used = self._is_slot_used  # another thread may replace it
            (places,) = np.nonzero(is_slot_used[hashes >> np.uint64(_shift(is_slot_used))])
            for index, anchor in zip(places.tolist(), hashes[places].tolist(), strict=True):
                for text_id in tuple(self._by_hash.get(anchor, ())):
                    _, place, length, digest = self._texts.get(text_id, (0, 0, 0, b""))
                    start = offset + index - place
                    if length and start >= 0 and start + length <= len(text):
                        yield start, start + length, digest, text_id

    def _grow(self) -> None:
        is_slot_used = np.zeros(4 * len(self._is_slot_used), dtype=bool)
        hashes = np.fromiter(self._by_hash, dtype=np.uint64, count=len(self._by_hash))
        is_slot_used[hashes >> np.uint64(_shift(is_slot_used))] = True
        self._is_slot_used = is_slot_used

    def _digest(self, text: str) -> bytes:
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=self._key).digest()

    def _hash(self, text: str) -> int:
        value = 0
        for character in text:
            value = (value * self._base + ord(character)) % _WORDS
        return value

    def _window_hashes(self, text: str) -> Hashes:
        """`_hash` of every window of the text: windows of 1, 2, 4, ... characters, each made from two shorter ones."""
        hashes: Hashes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
        if len(hashes) < ANCHOR_CHARACTERS:
            return hashes[:0]
        width, power = 1, self._base
        while width < ANCHOR_CHARACTERS:
            hashes = hashes[:-width] * np.uint64(power) + hashes[width:]
            width, power = 2 * width, power * power % _WORDS
        return hashes


def _shift(is_slot_used: NDArray[np.bool_]) -> int:
    """How far a hash is shifted to give a slot."""
    return 65 - len(is_slot_used).bit_length()
