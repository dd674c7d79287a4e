"""Cached chunks of stored documents: lookup, pinning and deletion between two engine steps.

A periodic sweep deletes expired documents and drops their chunks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvmosaic.api.documents import ChunkObject
from kvmosaic.cache import Chunk
from kvmosaic.cache.groups import Starts
from kvmosaic.cache.keys import TOKEN_BYTES, Key, encode_tokens
from kvmosaic.documents import DocumentDraft, DocumentStore, StoredDocument, label_in, shown_name
from kvmosaic.engine import Engine
from kvmosaic.errors import (
    DocumentStoreUnavailable,
    EngineError,
    InvalidPrompt,
    QuotaExceeded,
    UnknownChunk,
    UnknownDocument,
)
from kvmosaic.llm import LLM
from kvmosaic.prompt import Document
from kvmosaic.server.services import Services

Change = Literal["delete", "pin", "unpin"]
logger = logging.getLogger("kvmosaic.server")


MAX_COUNTED_CHARACTERS = 2**20
"""Longer texts are not tokenized when they are stored, only to count what a read will keep."""
MAX_COUNTED_LOOKUPS = 1_000


@dataclass(frozen=True, slots=True)
class _CachedText:
    """Tokens of a chunk after what it saw."""

    root: Key
    tokens: bytes
    is_exact: bool


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """State of one chunk at one moment."""

    key: Key
    names: tuple[str, ...]
    described: ChunkObject


async def find_cached(
    services: Services, tenant: str, documents: Sequence[StoredDocument]
) -> dict[str, list[ChunkObject]]:
    """Describes the chunks of the current texts of documents, by document id.

    Raises:
        EngineError: the engine no longer runs.
    """
    labels = [document.content.label for document in documents]
    found = await services.engine.call(partial(_look, tenant=tenant, labels=labels))
    return {document.id: [chunk.described for chunk in found[document.content.label]] for document in documents}


async def pin_cached(services: Services, tenant: str, document: StoredDocument) -> None:
    """Pins or unpins the chunks of a document, cached now or computed later.

    A chunk that another pinned document shares (their texts are equal) stays pinned.

    Raises:
        EngineError: the engine no longer runs.
        QuotaExceeded: the tenant has pinned too many documents; this one stays unpinned.
    """
    label = document.content.label
    try:
        found = await services.engine.call(partial(_look, tenant=tenant, labels=[label], keep=document.pinned))
    except QuotaExceeded:
        await services.threads.run(tenant, services.documents.set_pinned, tenant, document.id, False)
        raise
    owners = await _owners(services, tenant, (name for chunk in found[label] for name in chunk.names))
    changes: dict[Key, Change] = {
        chunk.key: "pin" if document.pinned or _is_pinned(chunk, owners) else "unpin" for chunk in found[label]
    }
    if changes:
        await services.engine.call(partial(_settle, tenant=tenant, changes=changes))


async def set_cached_priority(services: Services, tenant: str, document: StoredDocument) -> None:
    """Sets the priority of the cached chunks of a document; later ones get it when they are computed.

    Raises:
        EngineError: the engine no longer runs.
    """
    priority = 0.5 if document.content.priority is None else document.content.priority
    await services.engine.call(partial(_set_priority, tenant=tenant, label=document.content.label, priority=priority))


async def count_kept(
    services: Services, tenant: str, replaced: Sequence[tuple[StoredDocument, DocumentDraft]]
) -> dict[str, dict[str, int]]:
    """Counts what reading the new texts of replaced documents would keep of the cached chunks of their earlier texts.

    Only of these: what others have cached, under whatever salt, is not compared with the new texts.

    Args:
        services: services of the server.
        tenant: whose documents they are.
        replaced: the documents, and their new texts.

    Returns:
        By document id, `tokens` and `kept_tokens`. Missing: the earlier text is the same, or is not cached, or the new
        one is too long to be counted, or for a chunk.
    """
    short = [(document, draft) for document, draft in replaced if len(draft.text) <= MAX_COUNTED_CHARACTERS]
    if not short or not services.llm.has_chunk_cache:
        return {}
    documents = [document for document, _ in short]
    labels = await services.threads.run(tenant, _labels_before, services.documents, tenant, documents)
    try:
        wanted = list(set(labels.values()))
        before = await services.engine.call(partial(_texts, tenant=tenant, labels=wanted)) if wanted else {}
    except EngineError:
        return {}
    counted: dict[str, dict[str, int]] = {}
    for document, draft in short:
        if texts := before.get(labels.get(document.id, "")):
            text = Document(draft.text, draft.title, document.id)
            kept = await services.threads.run(tenant, _count_kept, services.llm, texts, text)
            if kept is not None:
                counted[document.id] = kept
    return counted


async def drop_superseded(services: Services, *, lingering: bool = False) -> None:
    """Drops the chunks of superseded texts, under all system texts and salts.

    Requests that read one finish on it. A chunk that another stored document of the tenant shares stays; a prompt that
    contains the same text inline does not protect it, and recomputes it. Chunks that fail to be dropped, also by a
    cancellation halfway, stay in the grace period, and the next sweep drops them.

    Args:
        services: services of the server.
        lingering: also drop chunks that requests from before have computed since.
    """
    superseded = services.documents.take_superseded()
    texts = [*services.documents.in_grace_period(), *superseded] if lingering else superseded
    labels: dict[str, list[str]] = {}
    for text in texts:
        labels.setdefault(text.tenant, []).append(text.label)
    try:
        for tenant, names in labels.items():
            await _drop(services, tenant, names)
    except EngineError:
        logger.warning("the chunks of %d replaced or deleted documents could not be dropped now", len(superseded))


async def _drop(services: Services, tenant: str, labels: Iterable[str]) -> None:
    names = list(dict.fromkeys(labels))
    found = await services.engine.call(partial(_look, tenant=tenant, labels=names, keep=False))
    kept = await services.engine.call(partial(_kept, tenant=tenant, labels=names))
    chunks = [chunk for chunks in found.values() for chunk in chunks]
    owners = await _owners(
        services, tenant, (name for used in (*(chunk.names for chunk in chunks), *kept.values()) for name in used)
    )
    changes: dict[Key, Change] = {}
    for chunk in chunks:
        if owners.keys().isdisjoint(chunk.names):
            changes[chunk.key] = "delete"
        elif chunk.described.pinned and not _is_pinned(chunk, owners):
            changes[chunk.key] = "unpin"
    for key, others in kept.items():
        if key not in changes and owners.keys().isdisjoint(others):
            changes[key] = "delete"
    if changes:
        await services.engine.call(partial(_settle, tenant=tenant, changes=changes))


async def _owners(services: Services, tenant: str, names: Iterable[str]) -> dict[str, StoredDocument]:
    """Returns the documents that have a readable text of these names, by name."""
    return await asyncio.to_thread(services.documents.owners, tenant, set(names))


def _is_pinned(chunk: CachedChunk, owners: Mapping[str, StoredDocument]) -> bool:
    """Whether it is a chunk of the current text of a pinned document."""
    owned = ((owners[name], label_in(name)[0]) for name in chunk.names if name in owners)
    return any(document.pinned and document.content.label == label for document, label in owned)


def _look(
    engine: Engine, *, tenant: str, labels: Sequence[str], keep: bool | None = None
) -> dict[str, list[CachedChunk]]:
    """Finds chunks by label; on the engine's thread. `keep`: whether chunks computed later are pinned too."""
    kv_cache = engine.kv_cache
    found: dict[str, list[CachedChunk]] = {label: [] for label in labels}
    if keep is not None:
        for label in labels:
            kv_cache.pin_when_ready(label, tenant, keep)
    if engine.chunk_config.long_chunks != "error":
        for chunk in kv_cache.chunks():
            if chunk.tenant == tenant:
                for name in chunk.names:
                    if (label := label_in(name)[0]) in found:
                        found[label].append(_view(engine, chunk, name))
        return found
    for label in labels:
        try:
            found[label] = [_view(engine, chunk, label) for chunk in kv_cache.find_chunks(label, None, tenant)]
        except UnknownChunk:
            continue
    return found


def _labels_before(store: DocumentStore, tenant: str, documents: Iterable[StoredDocument]) -> dict[str, str]:
    """Returns the labels of the texts that documents had before, by id; none where it is the same, or gone."""
    labels: dict[str, str] = {}
    for document in documents:
        with suppress(UnknownDocument):
            label = store.get(tenant, document.id, document.version - 1).content.label
            if label != document.content.label:
                labels[document.id] = label
    return labels


def _texts(engine: Engine, *, tenant: str, labels: Sequence[str]) -> dict[str, list[_CachedText]]:
    """Returns the tokens of the chunks of some texts, by label, the newest first; on the engine's thread."""
    found = _look(engine, tenant=tenant, labels=labels)
    return {
        label: [
            _CachedText(chunk.root, chunk.tokens, is_exact=not chunk.codec)
            for view in reversed(views)
            for chunk in engine.kv_cache.find_chunks(view.key, None, tenant)
        ]
        for label, views in found.items()
    }


def _count_kept(llm: LLM, texts: Sequence[_CachedText], document: Document) -> dict[str, int] | None:
    """Counts the cached tokens of the parts of a document, each after the system text with the most of them."""
    try:
        chunks = llm.encoder.encode_documents([document]).chunks
    except InvalidPrompt:
        return None
    parts = [encode_tokens(chunk.token_ids or ()) for chunk in chunks]
    starts: Starts[_CachedText] = Starts(llm.chunk_cache_config.block_size)
    for text in texts:
        if text.is_exact:
            starts.add(text)
    whole = {(text.root, text.tokens) for text in texts}
    roots = list(dict.fromkeys(text.root for text in texts))[: max(MAX_COUNTED_LOOKUPS // len(parts), 1)]

    def num_kept(root: Key, tokens: bytes) -> int:
        if (root, tokens) in whole:
            return len(tokens) // TOKEN_BYTES
        return starts.num_shared(root, tokens)

    kept = sum(max(num_kept(root, tokens) for root in roots) for tokens in parts)
    return {"tokens": sum(map(len, parts)) // TOKEN_BYTES, "kept_tokens": kept}


def _kept(engine: Engine, *, tenant: str, labels: Sequence[str]) -> dict[Key, tuple[str, ...]]:
    """Returns the names of offloaded chunks with these labels, as far as known; on the engine's thread."""
    if engine.offloader is None:
        return {}
    kept = engine.offloader.kept
    found: dict[Key, tuple[str, ...]] = {}
    for key in (key for label in labels for key in kept.named(label, None, tenant, with_parts=True)):
        try:
            present = engine.kv_cache.find_chunks(key, None, tenant)[0].names
        except UnknownChunk:
            present = ()
        found[key] = (*kept.names(key), *present)
    return found


def _settle(engine: Engine, *, tenant: str, changes: Mapping[Key, Change]) -> None:
    """Deletes, pins and unpins chunks, on the engine's thread. Chunks that are gone are skipped."""
    kv_cache = engine.kv_cache
    for key, change in changes.items():
        try:
            if change == "delete":
                kv_cache.delete(key, None, tenant, when_idle=True)
            elif change == "pin":
                kv_cache.pin(key, None, tenant)
            else:
                kv_cache.unpin(key, None, tenant)
        except UnknownChunk:
            if change == "delete" and engine.offloader is not None:  # only in the tiers
                engine.offloader.delete([key])


def _set_priority(engine: Engine, *, tenant: str, label: str, priority: float) -> None:
    """Sets the priority of all chunks with a label; on the engine's thread."""
    for chunk in _look(engine, tenant=tenant, labels=[label])[label]:
        engine.kv_cache.set_priority(chunk.key, priority, None, tenant)


def _view(engine: Engine, chunk: Chunk, name: str) -> CachedChunk:
    """Describes a chunk that was found under a name: the label of a text, with the part if the document was split."""
    _, _, part = shown_name(name).partition(" ")
    num_blocks = len(chunk.block_ids)
    described = ChunkObject(
        tier="device",
        state="ready" if chunk.is_ready else "computing",
        part=part.strip("()") or None,
        tokens=chunk.num_tokens,
        blocks=num_blocks,
        bytes=num_blocks * engine.kv_cache.bytes_per_block,
        hits=chunk.hits,
        in_use=chunk.ref_count,
        pinned=chunk.pinned,
        salted=bool(chunk.salt),
        compute_ms=round(chunk.compute_ms, 3),
    )
    return CachedChunk(chunk.key, tuple(chunk.names), described)


SWEEP_SECONDS = 5.0


@asynccontextmanager
async def swept(services: Services, seconds: float = SWEEP_SECONDS) -> AsyncIterator[None]:
    """Sweeps every few seconds, as long as the app lives."""
    task = asyncio.create_task(_sweep_always(services, seconds), name="document-sweep")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def sweep(services: Services) -> None:
    """Deletes expired documents, and drops the chunks of all superseded texts."""
    await asyncio.to_thread(_tidy, services.documents)
    await drop_superseded(services, lingering=True)


def _tidy(documents: DocumentStore) -> None:
    documents.expire()
    documents.save()


async def _sweep_always(services: Services, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await sweep(services)
        except DocumentStoreUnavailable as error:
            logger.warning("expired documents are not deleted now: %s", error)
        except Exception:  # the next sweep continues with the rest
            logger.exception("the sweep of stored documents failed")
