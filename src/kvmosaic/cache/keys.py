"""Cache keys: what a run of tokens is, and what it saw."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NewType

import xxhash

from kvmosaic.errors import InvalidConfig, InvalidTokenId

Key = NewType("Key", bytes)
HashAlgorithm = Literal["sha256", "xxh3_128"]

TOKEN_BYTES = 4
DEFAULT_TENANT = "default"
"""Of a server that is told of no other, and of whoever names none: what one computes, the other finds."""
_MAX_TOKEN_ID = 2**32 - 1
_ROOT, _BLOCK, _RUN, _NEXT, _PART = b"kvm-root", b"kvm-blok", b"kvm-run.", b"kvm-next", b"kvm-part"


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    return bytes(xxhash.xxh3_128_digest(data))


_DIGESTS: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType({"sha256": _sha256, "xxh3_128": _xxh3_128})


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as 4 little-endian bytes each: what is hashed, compared and kept.

    Raises:
        InvalidTokenId: an id that is not a whole number from 0 to 2**32 - 1.
    """
    try:
        numbers = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        wrong = next((x for x in token_ids if not isinstance(x, int) or not 0 <= x <= _MAX_TOKEN_ID), None)
        raise InvalidTokenId(f"{wrong!r} is not a token id; use whole numbers from 0 to {_MAX_TOKEN_ID}") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def decode_tokens(tokens: bytes) -> tuple[int, ...]:
    """The token ids again."""
    return struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)


class KeyChain:
    """Makes the keys of one model, one tenant and one salt.

        root(start, seen)             what a span saw and where it starts; no tokens yet
          ├─ run(root, tokens)        a whole closed span: a chunk, a system prompt; the key that others name in `seen`
          ├─ chunk(root, tokens)      a chunk, where it is looked up: the same bytes under the chosen hash
          └─ extend(root, block 0)    one block of the chain: the key of block i stands for everything up to block i
               └─ extend(…, block 1)

    A run key hashes all tokens of the span at once, so it does not depend on the block size, and it can never be
    mistaken for a block key: each kind of key starts with its own tag. Numbers have a fixed width, texts and lists
    carry their length, so no two different inputs give the same bytes to hash.

    What was seen is a collection without order (with repetitions): attention does not know in which order its keys are
    listed. So a question that reads the same chunks at the same distances has one root, whatever the prompt order.

    Roots and runs are always SHA-256: they enter other keys, where no collision could be noticed. `xxh3_128` makes the
    keys by which blocks and chunks are looked up faster. It is no defence against people who search for collisions, so
    the prefix cache then compares tokens, parents and roots of every block, and the chunk index and the tiers tokens
    and root of every chunk, whatever the configuration says.
    """

    def __init__(
        self, fingerprint: str, salt: str = "", algorithm: HashAlgorithm = "sha256", *, tenant: str = ""
    ) -> None:
        if algorithm not in _DIGESTS:
            raise InvalidConfig(f"hash_algorithm is {algorithm!r}; choose 'sha256' or 'xxh3_128'")
        self.algorithm = algorithm
        self._digest = _DIGESTS[algorithm]
        tenant = "" if tenant == DEFAULT_TENANT else tenant
        self._origin = _ROOT + _text(fingerprint) + _text(tenant) + _text(salt)

    def root(self, start: int, seen: Iterable[tuple[Key, int]] = ()) -> Key:
        """The key of a span before its first token: its start, and which runs it saw from which distance."""
        views = sorted(seen)
        parts = [self._origin, struct.pack("<qI", start, len(views))]
        parts += [struct.pack("<qI", distance, len(key)) + key for key, distance in views]
        return Key(_sha256(b"".join(parts)))

    def extend(self, key: Key, token_ids: Sequence[int]) -> Key:
        """The key of the next block (full or not) after `key`."""
        return self.extend_encoded(key, encode_tokens(token_ids))

    def run(self, root: Key, token_ids: Sequence[int]) -> Key:
        """The key of a whole closed span."""
        return self.run_encoded(root, encode_tokens(token_ids))

    def extend_encoded(self, key: Key, tokens: bytes) -> Key:
        """`extend` for tokens from `encode_tokens`."""
        return Key(self._digest(_BLOCK + struct.pack("<II", len(key), len(tokens)) + key + tokens))

    def run_encoded(self, root: Key, tokens: bytes) -> Key:
        """`run` for tokens from `encode_tokens`."""
        return Key(_sha256(_run(root, tokens)))

    def chunk(self, root: Key, tokens: bytes) -> Key:
        """The key by which a chunk is looked up, its tokens from `encode_tokens`; compare them with what it finds."""
        return Key(self._digest(_run(root, tokens)))

    def part_of(self, key: Key, *numbers: Sequence[int] | Sequence[float]) -> Key:
        """The key of a run that is seen in part, or not as it is: lists of numbers say what differs."""
        parts = [_PART, struct.pack("<I", len(key)), key]
        for values in numbers:
            parts.append(struct.pack("<I", len(values)))
            parts.append(struct.pack(f"<{len(values)}d", *values))
        return Key(_sha256(b"".join(parts)))

    def next_after(self, key: Key) -> Key:
        """The key to try when `key` is taken by other tokens (a collision)."""
        return Key(_sha256(_NEXT + key))


def _run(root: Key, tokens: bytes) -> bytes:
    return _RUN + struct.pack("<II", len(root), len(tokens)) + root + tokens


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data
