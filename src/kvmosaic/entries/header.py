"""The metadata of an entry, and its strict text form."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from kvmosaic.cache.keys import TOKEN_BYTES, Key
from kvmosaic.errors import DamagedEntry, ForeignEntry, InvalidConfig
from kvmosaic.layers.geometry import MAX_LAYERS, LayerGeometry

FORMAT_VERSION = 1
MAX_TOKENS = 2**21
MAX_KEY_BYTES = 64
MAX_NAMES = 16
MAX_TEXT = 256
"""Maximum characters of a name, a tenant and a fingerprint."""
MAX_START = 2**48
MAX_SECONDS = 1e12

DtypeName: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]
CodecName: TypeAlias = Literal["none", "int8"]

StateShape: TypeAlias = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor of a state."""
MAX_STATES = 8 * MAX_LAYERS
_MAX_RANK = 8
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_CODECS = ("none", "int8")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """Metadata of an entry: content, owner and encoding.

    Independent of the block size: a chunk is stored token by token, and fits into any pool.
    """

    fingerprint: str
    """Of the model that computed it; see `kvmosaic.model.fingerprint`."""
    key: Key
    root: Key
    """Key of what the chunk saw and where it starts."""
    start: int
    """The position of its first token, for which its keys are rotated."""
    tokens: bytes
    """Its token ids, encoded as in `kvmosaic.cache.keys`."""
    layers: tuple[LayerGeometry, ...]
    dtype: DtypeName
    """Of the pool that it came from; a codec stores another type."""
    codec: CodecName = "none"
    states: tuple[StateShape, ...] = ()
    """For models with states: what is kept of the document beside its keys and values, never changed by a codec."""
    names: tuple[str, ...] = ()
    """Its names, latest last; the last `MAX_NAMES` are kept, each cut at `MAX_TEXT` characters."""
    tenant: str = ""
    """A label for listings; cut like a name."""
    compute_seconds: float = 0.0
    """Seconds that computing it took."""
    created: float = 0.0
    """Seconds since the epoch."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return len(self.tokens) // TOKEN_BYTES


def check_header(header: EntryHeader) -> None:
    """Rejects invalid metadata.

    Raises:
        InvalidConfig: naming the field, the value and the limit.
    """
    is_right = {
        "fingerprint": 0 < len(header.fingerprint) <= MAX_TEXT and _is_text(header.fingerprint),
        "key": 0 < len(header.key) <= MAX_KEY_BYTES,
        "root": 0 < len(header.root) <= MAX_KEY_BYTES,
        "start": 0 <= header.start <= MAX_START,
        "tokens": 0 < len(header.tokens) <= MAX_TOKENS * TOKEN_BYTES and len(header.tokens) % TOKEN_BYTES == 0,
        "layers": 0 < len(header.layers) <= MAX_LAYERS and _have_sources(header.layers),
        "dtype": header.dtype in _DTYPES,
        "codec": header.codec in _CODECS,
        "states": len(header.states) <= MAX_STATES and all(map(_is_state, header.states)),
        "compute_seconds": math.isfinite(header.compute_seconds) and 0 <= header.compute_seconds <= MAX_SECONDS,
        "created": math.isfinite(header.created) and 0 <= header.created <= MAX_SECONDS,
    }
    for name, right in is_right.items():
        if not right:
            value = getattr(header, name)
            raise InvalidConfig(
                f"a stored chunk cannot have {name} {value!r:.80} ({_size(value)}); at most {MAX_TOKENS} tokens, "
                f"{MAX_LAYERS} layers, {MAX_TEXT} characters and {MAX_KEY_BYTES} bytes of a key can be stored"
            )


def to_texts(header: EntryHeader) -> dict[str, str]:
    """Metadata as texts, in the only accepted order and form."""
    return {
        "version": str(FORMAT_VERSION),
        "fingerprint": header.fingerprint,
        "key": header.key.hex(),
        "root": header.root.hex(),
        "start": str(header.start),
        "tokens": base64.b64encode(header.tokens).decode(),
        "layers": _compact([layer.numbers for layer in header.layers]),
        "dtype": header.dtype,
        "codec": header.codec,
        **({"states": _compact(header.states)} if header.states else {}),
        "names": _compact([_cut(name) for name in header.names[-MAX_NAMES:]]),
        "tenant": _cut(header.tenant),
        "compute_seconds": repr(float(header.compute_seconds)),
        "created": repr(float(header.created)),
    }


def from_texts(texts: Mapping[str, Any]) -> EntryHeader:
    """Inverse of `to_texts`.

    Raises:
        ForeignEntry: another version of the format, or a codec of another version.
        DamagedEntry: a field that is missing, unknown, malformed or beyond its limit.
    """
    version = texts.get("version")
    if version != str(FORMAT_VERSION):
        raise ForeignEntry(
            f"the entry has format version {version!r:.40}, expected {FORMAT_VERSION}; it is left out; "
            "give processes of different versions of kvmosaic places of their own, or delete the older entries"
        )
    values: dict[str, Any] = {}
    for name, read in _READERS.items():
        text = texts.get(name, "[]" if name == "states" else None)
        try:
            if not isinstance(text, str):
                raise ValueError("missing")
            values[name] = read(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedEntry(
                f"the entry has {name} {text!r:.80}, which cannot be read ({error!s:.80}); "
                "it is left out and computed again"
            ) from error
    header = EntryHeader(**values)
    if header.codec not in _CODECS:
        raise ForeignEntry(
            f"the entry has codec {header.codec!r:.40}, which another version of kvmosaic stored; only codecs "
            f"{' and '.join(_CODECS)} are read; it is left out and computed again"
        )
    try:
        check_header(header)
    except InvalidConfig as error:
        raise DamagedEntry(f"{error}; the entry is left out and computed again") from error
    if {"version": version, **to_texts(header)} != dict(texts):
        wrong = sorted(name for name in {*texts, *to_texts(header)} if texts.get(name) != to_texts(header).get(name))
        raise DamagedEntry(
            f"the entry spells {wrong!r:.80} otherwise than it was written, or has fields that version "
            f"{FORMAT_VERSION} does not have; it is left out and computed again"
        )
    return header


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError("not a whole number")
    return int(text)


def _real(text: str) -> float:
    if len(text) > 32:
        raise ValueError("too long")
    return float(text)


def _layers(text: str) -> tuple[LayerGeometry, ...]:
    items = json.loads(text)
    if not isinstance(items, list) or len(items) > MAX_LAYERS:
        raise ValueError(f"not a list of at most {MAX_LAYERS} layers")
    return tuple(LayerGeometry.from_numbers(item) for item in items)


def _states(text: str) -> tuple[StateShape, ...]:
    items = json.loads(text)
    if not isinstance(items, list) or len(items) > MAX_STATES:
        raise ValueError(f"not a list of at most {MAX_STATES} tensors")
    return tuple((dtype, tuple(shape)) for dtype, shape in items)


def _is_state(state: StateShape) -> bool:
    dtype, shape = state
    return dtype in _DTYPES and len(shape) <= _MAX_RANK and all(type(n) is int and 0 < n < 2**31 for n in shape)


def _names(text: str) -> tuple[str, ...]:
    items = json.loads(text)
    if not isinstance(items, list) or len(items) > MAX_NAMES or not all(isinstance(item, str) for item in items):
        raise ValueError(f"not a list of at most {MAX_NAMES} texts")
    return tuple(items)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "fingerprint": str,
    "key": bytes.fromhex,
    "root": bytes.fromhex,
    "start": _number,
    "tokens": lambda text: base64.b64decode(text, validate=True),
    "layers": _layers,
    "dtype": str,
    "codec": str,
    "states": _states,
    "names": _names,
    "tenant": str,
    "compute_seconds": _real,
    "created": _real,
}
assert set(_READERS) == {field.name for field in fields(EntryHeader)}


def _have_sources(layers: tuple[LayerGeometry, ...]) -> bool:
    sources = [layer.source_layer for layer in layers]
    return all(source <= index and sources[source] == source for index, source in enumerate(sources))


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _cut(text: str) -> str:
    """A text cut at the limit, and without what UTF-8 cannot encode."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()


def _is_text(text: str) -> bool:
    return text == text.encode("utf-8", "replace").decode()


def _size(value: object) -> str:
    return f"{len(value)} long" if isinstance(value, str | bytes | tuple) else type(value).__name__
