"""Cache keys: hashes of a run of tokens and of what it saw."""

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
"""Default secret and tenant, when none is configured or named: entries are shared among all such users."""
_MAX_TOKEN_ID = 2**32 - 1
_ADAPTER = b"kvm-lora"
_ROOT, _BLOCK, _RUN, _NEXT, _PART = b"kvm-root", b"kvm-blok", b"kvm-run.", b"kvm-next", b"kvm-part"


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    return bytes(xxhash.xxh3_128_digest(data))


_DIGESTS: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType({"sha256": _sha256, "xxh3_128": _xxh3_128})


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as 4 little-endian bytes each: the form that is hashed, compared and stored.

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
    """Inverse of `encode_tokens`."""
    return struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)


class KeyChain:
    """Key derivation for one model, one tenant, one salt and one adapter (the digest of its content, if any).

        root(start, seen)             what a span saw and where it starts; no tokens yet
          ├─ run(root, tokens)        a whole closed span: a chunk, a system prompt; the key listed in `seen`
          ├─ chunk(root, tokens)      a chunk, for lookups: the same bytes under the chosen hash
          └─ extend(root, block 0)    one block of the chain: the key of block i covers everything up to block i
               └─ extend(…, block 1)

    A run key hashes all tokens of the span at once, so it does not depend on the block size, and it can never be
    mistaken for a block key: each kind of key starts with its own tag. Numbers have a fixed width, texts and lists
    carry their length, so no two different inputs give the same bytes to hash.

    What was seen is an unordered multiset: attention does not depend on the order of keys. So a question that reads the
    same chunks at the same distances has one root, independent of the prompt order. For models with states, which do
    depend on it, chains are made with `is_ordered`.

    Roots and runs are always SHA-256: they enter other keys, where a collision would go unnoticed. `xxh3_128` makes the
    lookup keys of blocks and chunks faster to compute. It does not resist crafted collisions, so the prefix cache then
    compares tokens, parents and roots of every block, and the chunk index and the tiers tokens and root of every chunk,
    independent of the configuration.
    """

    def __init__(
        self,
        fingerprint: str,
        salt: str = "",
        algorithm: HashAlgorithm = "sha256",
        *,
        tenant: str = "",
        adapter: str = "",
        is_ordered: bool = False,
    ) -> None:
        if algorithm not in _DIGESTS:
            raise InvalidConfig(f"hash_algorithm is {algorithm!r}; choose 'sha256' or 'xxh3_128'")
        self.algorithm = algorithm
        self._is_ordered = is_ordered
        self._digest = _DIGESTS[algorithm]
        tenant = "" if tenant == DEFAULT_TENANT else tenant
        self._origin = _ROOT + _text(fingerprint) + _text(tenant) + _text(salt)
        if adapter:  # keys of the base model are as before adapters existed
            self._origin += _ADAPTER + _text(adapter)

    def root(self, start: int, seen: Iterable[tuple[Key, int]] = ()) -> Key:
        """The key of a span before its first token: its start, and the runs it saw, each with its distance."""
        views = list(seen) if self._is_ordered else sorted(seen)
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
        """The lookup key of a chunk, its tokens from `encode_tokens`; compare them with those of the hit."""
        return Key(self._digest(_run(root, tokens)))

    def part_of(self, key: Key, *numbers: Sequence[int] | Sequence[float]) -> Key:
        """The key of a run seen in part or modified; lists of numbers say what differs."""
        parts = [_PART, struct.pack("<I", len(key)), key]
        for values in numbers:
            parts.append(struct.pack("<I", len(values)))
            parts.append(struct.pack(f"<{len(values)}d", *values))
        return Key(_sha256(b"".join(parts)))

    def next_after(self, key: Key) -> Key:
        """The key to try next when `key` is taken by other tokens (a collision)."""
        return Key(_sha256(_NEXT + key))


def _run(root: Key, tokens: bytes) -> bytes:
    return _RUN + struct.pack("<II", len(root), len(tokens)) + root + tokens


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data
