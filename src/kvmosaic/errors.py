"""All errors of kvmosaic, in one tree.

    KVMosaicError
    ├── InvalidConfig                 a setting that cannot work
    │   ├── InvalidRepair             a repair policy that does not exist, or does not suit the request
    │   ├── InvalidPreamble           a rule for the end of the preamble that cannot be read or used
    │   ├── InvalidProfile            a file that is no profile of this model
    │   ├── InvalidAdapter            a folder that holds no adapter of this model
    │   ├── MissingExtra              a library that is not installed, of one of our extras
    │   ├── NativeUnavailable         the C extension is asked for and is not there
    │   └── TritonUnavailable         Triton attention is asked for and cannot run here
    ├── InvalidPrompt                 a prompt that cannot be answered
    │   ├── EmptySegment              a system text, document or question without tokens
    │   ├── ChunkTooLong              a document longer than `max_chunk_tokens`
    │   ├── PromptTooLong             more positions than the model has
    │   ├── TooManyChunks             more documents than a prompt may have
    │   ├── InvalidTokenId            a token id outside the vocabulary
    │   ├── InvalidSees               a chunk whose `sees` names one that is not before it
    │   ├── InvalidSeparator          a separator that cannot split anything
    │   ├── InvalidOffset             a `position_offset` that is missing, negative or overlapping
    │   ├── InvalidPriority           a request's priority outside its range
    │   ├── InvalidMessages           chat messages that are not chat messages
    │   ├── InvalidTools              tools that cannot be called, or a choice that does not go with them
    │   └── InvalidDocument           a document that is not a mapping with a text
    ├── InvalidSampling               sampling parameters outside their range
    ├── CacheError
    │   ├── OutOfBlocks               a pool has no block left that may be taken
    │   │   └── QuotaInUse            a tenant's running requests hold all that it may have
    │   ├── ChunkCacheFull            a chunk that cannot fit, even after eviction
    │   │   └── QuotaExceeded         more than the tenant may have
    │   ├── ChunkCacheOff             chunks are asked for and the chunk cache is off
    │   ├── UnknownChunk              a name or handle that no chunk has
    │   ├── ChunkInUse                deleting a chunk that a running request reads
    │   ├── OutOfStep                 a rolling cache is called in the wrong order
    │   ├── InvalidChunk              a chunk that a rolling cache cannot take: its number, shape, dtype or device
    │   ├── InvalidEntry              a stored chunk that is not to be used
    │   │   ├── DamagedEntry          its bytes differ from the bytes written
    │   │   └── ForeignEntry          of another model, format version, secret or shape
    │   │       └── OtherSecret       sealed with a secret that is not ours
    │   └── TierError                 a tier that cannot do what was asked now
    │       ├── TierUnavailable       its storage fails, or times out
    │       └── TierFull              its storage is full
    ├── DocumentError
    │   ├── UnknownDocument           an id that no stored document has
    │   ├── DocumentExists            creating a document under an id that is taken
    │   ├── DocumentChanged           a change that was meant for another version
    │   ├── DocumentTooLarge          a text longer than may be stored
    │   └── DocumentStoreFull         more documents or bytes than a tenant may store
    ├── ModelError
    │   ├── ModelNotFound             no folder, no file and no hub name
    │   ├── UnsupportedModel          a model whose attention cannot be reached or composed
    │   └── NotMovable                moved chunks on a model that does not allow them
    ├── EngineError
    │   ├── UnknownRequest            a request id the engine does not have
    │   ├── RequestTooLarge           a request that could never run in the given memory
    │   ├── QueueFull                 a request more than may wait
    │   ├── EngineAsleep              asked while it sleeps
    │   ├── EngineFailing             steps fail again and again; it may pass
    │   └── EngineStopped             use after `close`
    └── ServerError                   a running server that cannot be asked, or does not do what it is asked

A message states the value, the limit and the way out. After any of them the cache is as it was before the call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit


class KVMosaicError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidConfig(KVMosaicError, ValueError):
    """A setting that cannot work."""


class InvalidRepair(InvalidConfig):
    """A repair policy that does not exist, or does not suit the model or the request."""


class InvalidPreamble(InvalidConfig):
    """A rule for the end of the preamble that cannot be read, or takes too long."""


class InvalidProfile(InvalidConfig):
    """A file that is no profile, or a profile of another model or version."""


class InvalidAdapter(InvalidConfig):
    """A folder that holds no adapter, a damaged one, or one for another model."""


class MissingExtra(InvalidConfig):
    """What was asked for needs a library that is not installed."""


class NativeUnavailable(InvalidConfig):
    """The C extension is asked for and is not there."""


class TritonUnavailable(InvalidConfig):
    """Triton attention is asked for and cannot run here."""


class InvalidPrompt(KVMosaicError, ValueError):
    """A prompt that cannot be answered.

    `document` tells which of its documents is to blame, counted from 0, if it is one of them.
    """

    def __init__(self, message: str = "", *, document: int | None = None) -> None:
        super().__init__(message)
        self.document = document


class EmptySegment(InvalidPrompt):
    """A system text, document or question without tokens."""


class ChunkTooLong(InvalidPrompt):
    """A document longer than `max_chunk_tokens`."""


class PromptTooLong(InvalidPrompt):
    """More positions than the model has: so many tokens (0: unknown), and its maximum."""

    def __init__(
        self, message: str = "", *, num_tokens: int = 0, max_tokens: int = 0, document: int | None = None
    ) -> None:
        super().__init__(message, document=document)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class TooMuchWork(KVMosaicError):
    """Reading a request takes more processor time than a server spends on it."""


class TooManyChunks(InvalidPrompt):
    """More documents than a prompt may have."""


class InvalidTokenId(InvalidPrompt):
    """A token id outside the vocabulary."""


class InvalidSees(InvalidPrompt):
    """A chunk whose `sees` names a chunk that is not before it."""


class InvalidSeparator(InvalidPrompt):
    """A separator that cannot split anything."""


class InvalidOffset(InvalidPrompt):
    """A `position_offset` that is missing, negative or overlaps the system prompt."""


class InvalidPriority(InvalidPrompt):
    """A request's priority outside its range."""


class InvalidMessages(InvalidPrompt):
    """Chat messages that are not chat messages."""


class InvalidTools(InvalidPrompt):
    """Tools that cannot be called, or a choice that does not go with them."""


class InvalidDocument(InvalidPrompt):
    """A document that is not a mapping with a text."""


class InvalidSampling(KVMosaicError, ValueError):
    """Sampling parameters outside their range."""


class CacheError(KVMosaicError):
    """The cache cannot do what was asked."""


class OutOfBlocks(CacheError):
    """A pool has no block left that may be taken.

    `pool` is its name, and `num_missing` how many blocks are, where that is known.
    """

    def __init__(self, message: str, *, pool: str = "", num_missing: int | None = None) -> None:
        super().__init__(message)
        self.pool = pool
        self.num_missing = num_missing


class QuotaInUse(OutOfBlocks):
    """A tenant's running requests hold all that it may have; others need not wait for them."""


class ChunkCacheFull(CacheError, MemoryError):
    """A chunk that cannot fit, even after eviction."""


class QuotaExceeded(ChunkCacheFull):
    """More than the tenant may have, even with nothing else of it in the cache but what is pinned."""


class ChunkCacheOff(CacheError):
    """Chunks are asked for and the chunk cache is off."""


class UnknownChunk(CacheError, KeyError):
    """A name or handle that no cached chunk has."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class ChunkInUse(CacheError):
    """Deleting a chunk that a running request reads."""


class OutOfStep(CacheError, RuntimeError):
    """A rolling cache is called in the wrong order."""


class InvalidChunk(CacheError, ValueError):
    """A chunk that a rolling cache cannot take: its number, shape, dtype or device."""


class InvalidEntry(CacheError):
    """A stored chunk that is not to be used."""


class DamagedEntry(InvalidEntry):
    """The bytes of a stored chunk differ from the bytes written."""


class ForeignEntry(InvalidEntry):
    """A stored chunk of another model, format version, secret or shape."""


class OtherSecret(ForeignEntry):
    """A stored chunk that is sealed with a secret that is not ours: it may be good for others, and is left alone."""


class TierError(CacheError):
    """A tier that cannot do what was asked now."""


class TierUnavailable(TierError):
    """The storage of a tier fails, or times out."""


class TierFull(TierError):
    """The storage of a tier is full."""


class DocumentError(KVMosaicError):
    """A stored document cannot be used as asked."""


class UnknownDocument(DocumentError, KeyError):
    """An id that no stored document has."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class DocumentExists(DocumentError):
    """Creating a document under an id that is taken."""


class DocumentChanged(DocumentError):
    """A change that was meant for another version of a document."""


class DocumentTooLarge(DocumentError):
    """A text longer than may be stored."""


class DocumentStoreFull(DocumentError):
    """More documents, or more bytes of text, than a tenant may store."""


class DocumentStoreUnavailable(DocumentError):
    """The database of stored documents does not answer, or cannot be written to."""


class DocumentDamaged(DocumentError):
    """A stored text is not what was stored."""


class ModelError(KVMosaicError):
    """The model cannot be used as asked."""


class ModelNotFound(ModelError):
    """No folder, no file and no hub name."""


WAY_OUT = "use another model, docs/architectures.md lists the supported ones"
"""The last words of messages about models that cannot be run."""


class UnsupportedModel(ModelError):
    """A model whose attention cannot be reached, or not be composed of parts."""


class KeepsState(UnsupportedModel):
    """A model with layers that carry a state, in an engine that keeps it for whole texts only."""


class NotMovable(ModelError):
    """Moved chunks were asked of a model whose keys cannot be moved."""


class EngineError(KVMosaicError):
    """The engine cannot do what was asked."""


class UnknownRequest(EngineError, KeyError):
    """A request id the engine does not have."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RequestTooLarge(EngineError):
    """A request that could never run in the memory the engine has."""


class QueueFull(EngineError):
    """As many requests wait as may wait."""


class EngineAsleep(EngineError):
    """Asked while it sleeps, and told to refuse that."""


class EngineFailing(EngineError):
    """Several steps in a row have failed, and none has gone well since."""


class EngineStopped(EngineError):
    """The engine was used after it was closed."""


class ServerError(KVMosaicError):
    """A running server cannot be asked, or does not do what it is asked."""


def first_fault(faults: Sequence[Any]) -> str:
    """The first fault that pydantic found, with its place: "tasks[1].cases: Input should be at least 1, got 0"."""
    fault = faults[0]
    told, got, names = fault["msg"].removeprefix("Value error, "), f", got {fault['input']!r:.80}", fault["loc"]
    if fault["type"] == "value_error":
        got = ""
    elif fault["type"] in ("missing", "unexpected_keyword_argument"):
        *names, name = names
        told, got = f"there is no {name!r}" if fault["type"] == "missing" else f"{name!r:.80} is unknown", ""
    place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in names).lstrip(".")[:200]
    return f"{place}: {told}{got}" if place else f"{told}{got}"


def pip_install(extra: str) -> str:
    """The command that adds an extra to this installation: of a checkout, of a file, or of a package index."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow, and hardly ever needed

    try:
        said = json.loads(distribution("kvmosaic").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        said = {}
    url = said.get("url", "")
    if said.get("dir_info", {}).get("editable"):
        return f"pip install -e '{unquote(urlsplit(url).path)}[{extra}]'"
    return f"pip install 'kvmosaic[{extra}]{url and f' @ {url}'}'"
