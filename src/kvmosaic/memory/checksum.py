"""The seal of an entry: its secret's label and a checksum over all of its bytes, at places that never move.

    0        8                           35         99           111     127
    | length | {"__metadata__":{"blake3":" | checksum | ","secret":" | label | …

The checksum is BLAKE3 over the whole entry with zeros in its own place, so it is checked before a single byte is
interpreted. With a secret it is keyed: who does not know the secret can neither change nor make an entry. The label
tells which secret that was, and nothing about it that a guess could not be tried on anyway.
"""

from __future__ import annotations

from typing import TypeAlias

from blake3 import blake3

from kvmosaic.errors import DamagedEntry, InvalidConfig, OtherSecret

Bytes: TypeAlias = bytes | bytearray | memoryview

OPENING = b'{"__metadata__":{"blake3":"'
BETWEEN = b'","secret":"'
_DIGEST_AT = 8 + len(OPENING)
_DIGEST_END = _DIGEST_AT + 64
_LABEL_AT = _DIGEST_END + len(BETWEEN)
_LABEL_END = _LABEL_AT + 16
NO_DIGEST = "0" * 64
NO_LABEL = "0" * 16
SMALLEST_ENTRY = _LABEL_END


class Checksum:
    """Seals entries, and checks seals, with one secret or with none."""

    def __init__(self, secret: str | None = None) -> None:
        """Takes any text as a secret; a long random one is needed to keep an attacker out.

        Raises:
            InvalidConfig: an empty secret, which would protect nothing.
        """
        if secret == "":
            raise InvalidConfig("the secret of the cache tiers is empty; give one, or leave it out")
        self._key: bytes | None = None
        self.label = NO_LABEL
        if secret is not None:
            text = secret.encode("utf-8", "surrogatepass")
            self._key = blake3(text, derive_key_context="kvmosaic 2026-11-21 entry checksum").digest()
            self.label = blake3(text, derive_key_context="kvmosaic 2026-11-21 secret label").hexdigest(8)

    def digest(self, entry: Bytes) -> bytes:
        """The checksum (64 hexadecimal digits) of an entry with our label, whatever stands in either place now."""
        view = memoryview(entry)
        hasher = blake3(key=self._key) if self._key is not None else blake3()
        hasher.update(view[:_DIGEST_AT])
        hasher.update(NO_DIGEST.encode())
        hasher.update(view[_DIGEST_END:_LABEL_AT])
        hasher.update(self.label.encode())
        hasher.update(view[_LABEL_END:])
        return hasher.hexdigest().encode()

    def close(self, entry: bytearray | memoryview) -> None:
        """Writes the checksum into an entry that is otherwise complete."""
        entry[_DIGEST_AT:_DIGEST_END] = self.digest(entry)

    def check(self, entry: Bytes) -> None:
        """Checks every byte of an entry.

        Raises:
            OtherSecret: sealed with another secret, or with none.
            DamagedEntry: not the bytes that were sealed.
        """
        view = memoryview(entry)
        found, digest = bytes(view[_DIGEST_AT:_DIGEST_END]), self.digest(entry)
        label = bytes(view[_LABEL_AT:_LABEL_END])
        is_ours = label == self.label.encode()
        if found == digest and is_ours:
            return
        if found == digest:
            raise DamagedEntry(
                f"the entry is sealed as ours, but names {_named(label)}: it was changed; "
                "it is left out and computed again"
            )
        if not is_ours:
            raise OtherSecret(
                f"the entry is sealed with {_named(label)}, expected {_named(self.label.encode())}; give all processes "
                "that share this cache the same secret, or each its own place"
            )
        raise DamagedEntry(
            f"the checksum of the entry is {digest.decode()}, but {_shown(found)} is written in it: its bytes are not "
            "those that were stored; it is left out and computed again; check the medium if it happens often"
        )


def check_magic(start: Bytes) -> None:
    """Checks that this can be an entry at all.

    Raises:
        DamagedEntry: too short, or other bytes where every version has the same ones.
    """
    start = bytes(memoryview(start)[:SMALLEST_ENTRY])
    if len(start) < SMALLEST_ENTRY:
        raise DamagedEntry(
            f"the entry has {len(start)} bytes, expected at least {SMALLEST_ENTRY}: it was cut short; "
            "it is left out and computed again"
        )
    if start[8:_DIGEST_AT] != OPENING or start[_DIGEST_END:_LABEL_AT] != BETWEEN:
        raise DamagedEntry(
            f"the entry starts with {_shown(start[8:_DIGEST_AT])}, expected {OPENING.decode()!r}: "
            "it is no stored chunk; it is left out and computed again; keep other files away from this place"
        )


def _named(label: bytes) -> str:
    return "no secret" if label == NO_LABEL.encode() else f"the secret {_shown(label)}"


def _shown(data: bytes) -> str:
    return repr(data.decode("ascii", "backslashreplace"))
