"""ObjectTier: entries as objects of S3, Google Cloud Storage, Azure Blob Storage, or files in a folder."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidConfig, TierError, TierFull, TierUnavailable, pip_install
from kvmosaic.tiers.settings import ObjectSettings
from kvmosaic.tiers.tier import (
    MAX_ENTRY_BYTES,
    Deadline,
    Entry,
    Notices,
    TierCounters,
    TierStat,
    check_size,
)

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import MemoryStore, from_url
except ModuleNotFoundError as error:
    raise InvalidConfig(f"an object tier needs the package obstore; {pip_install('tiers')}") from error

logger = logging.getLogger("kvmosaic")

_IN_THE_WAY = re.compile(rf"\(os error ({errno.ENOTDIR}|{errno.EISDIR}|{errno.ELOOP})\)")
_PART_BYTES = 2**24
_LETTING_GO_SECONDS = 0.05
"""obstore's threads release Python objects a moment after they answer; a process that exits earlier is aborted."""
_FAIR_SECONDS = 0.02
"""With a shorter deadline, an unreachable store cannot be distinguished from a busy one."""

_T = TypeVar("_T")


class ObjectTier:
    """One object per entry: `<prefix>/<first 2 hex digits>/<key in hex>.safetensors`.

    An object store writes whole objects or nothing, so a reader never sees a part of one. It has no quota and evicts
    nothing by itself: set lifecycle rules for old objects and for unfinished multipart uploads. A thread runs the
    requests, so that a deadline cancels them; a cancelled request is never reported as done.
    """

    name = "object"
    is_persistent = True

    def __init__(self, settings: ObjectSettings) -> None:
        """Opens the store, without a request.

        Raises:
            InvalidConfig: the store rejects the address.
        """
        self.settings = settings
        self._address = settings.address
        try:
            self._store = from_url(settings.address, **settings.store_options)
        except (BaseError, ValueError, TypeError, OSError) as error:
            raise InvalidConfig(f"no object tier at {settings.address}: {_first_line(error)}") from error
        self._tally = TierCounters()
        self._notices = Notices(logger)
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvmosaic-object-tier", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def from_url(cls, url: str) -> ObjectTier:
        """See `ObjectSettings.from_url`."""
        return cls(ObjectSettings.from_url(url))

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """See `Tier.put_many`."""
        stored: set[Key] = set()

        async def put(key: Key) -> None:
            view = memoryview(entries[key]).cast("B")
            if len(view) > MAX_ENTRY_BYTES:
                return
            if isinstance(self._store, MemoryStore):
                view = memoryview(bytes(view))  # avoids a reference to the caller's buffer
            is_large = len(view) > _PART_BYTES
            with self._absence_allowed(key):
                await obstore.put_async(
                    self._store, _path(key), view, use_multipart=is_large, chunk_size=_PART_BYTES, max_concurrency=4
                )
                stored.add(key)
                self._tally.count(puts=1, put_bytes=len(view))

        self._for_each(entries, put, deadline)
        return stored

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """See `Tier.get_many`."""
        found: dict[Key, Entry] = {}
        sizes: dict[Key, int] = {}
        most = MAX_ENTRY_BYTES if max_bytes is None else min(max_bytes, MAX_ENTRY_BYTES)

        async def get(key: Key) -> None:
            with self._absence_allowed(key):
                result = await obstore.get_async(self._store, _path(key))
                sizes[key] = size = result.meta["size"]
                if size <= most and (entry := await _read(result, size)) is not None:
                    found[key] = entry

        self._for_each(keys, get, deadline)
        found, sizes = dict(found), dict(sizes)  # late replies do not change the copies
        for key, size in sizes.items():
            check_size(key, size, max_bytes)
        num_bytes = sum(len(entry) for entry in found.values())
        self._tally.count(hits=len(found), misses=len(set(keys)) - len(found), get_bytes=num_bytes)
        return found

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.exists_many`."""
        found: set[Key] = set()

        async def look(key: Key) -> None:
            with self._absence_allowed(key):
                await obstore.head_async(self._store, _path(key))
                found.add(key)

        self._for_each(keys, look, deadline)
        return set(found)

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.delete_many`."""
        gone: set[Key] = set()

        async def delete(key: Key) -> None:
            with self._absence_allowed(key):  # another client deleted it first
                await obstore.head_async(self._store, _path(key))
                await obstore.delete_async(self._store, _path(key))
                gone.add(key)

        self._for_each(keys, delete, deadline)
        return set(gone)

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """Does nothing: object stores do not track uses."""

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """Deletes the object; a versioned store still has it."""
        if self.delete_many([key], deadline):
            self._tally.count(quarantined=1)
            logger.warning("deleted entry %s from %s: %s", key.hex(), self._address, reason)

    def stat(self) -> TierStat:
        """See `Tier.stat`."""
        return TierStat(self.name, self._address, None, None, None, **self._tally.counts())

    def close(self) -> None:
        """Stops the thread; in-flight requests are cancelled."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True

        async def give_up() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(give_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        atexit.unregister(self.close)
        time.sleep(_LETTING_GO_SECONDS)

    @contextlib.contextmanager
    def _absence_allowed(self, key: Key) -> Iterator[None]:
        """Suppresses a missing object, or something else in its place: only this object is affected."""
        try:
            yield
        except FileNotFoundError:
            pass
        except (BaseError, OSError) as error:
            if not self._address.startswith("file:") or not _IN_THE_WAY.search(str(error)):
                raise
            path = f"{self._address.rstrip('/')}/{_path(key)}"
            why = _first_line(error)
            self._notices.warn_once(path, f"{path} is no place for an entry; remove what is in its place: {why}")

    def _for_each(
        self, keys: Collection[Key], ask: Callable[[Key], Coroutine[Any, Any, None]], deadline: Deadline
    ) -> None:
        """Runs `ask` for all keys, several at once; requests unanswered by the deadline are cancelled."""
        answered: list[Key] = []

        async def ask_all() -> None:
            limit = asyncio.Semaphore(self.settings.concurrency)

            async def ask_one(key: Key) -> None:
                async with limit:
                    await ask(key)
                    answered.append(key)

            async with asyncio.TaskGroup() as group:
                for key in keys:
                    group.create_task(ask_one(key))

        if keys:
            self._run(ask_all, deadline, answered)

    def _run(
        self, ask: Callable[[], Coroutine[Any, Any, _T]], deadline: Deadline, answered: Collection[Key] = ()
    ) -> _T | None:
        """Result of the requests; None if the deadline ended them after some answer, or left no time to try.

        Raises:
            TierUnavailable: no answer at all. TierFull: no space.
        """
        seconds = deadline.remaining
        if seconds <= 0.0:
            return None
        with self._lock:
            if self._is_closed:
                raise TierUnavailable(f"the object tier at {self._address} is closed")
            task = asyncio.wait_for(ask(), None if math.isinf(seconds) else seconds)
            future = asyncio.run_coroutine_threadsafe(task, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise TierUnavailable(f"the object tier at {self._address} was closed meanwhile") from error
        except TimeoutError as error:
            if answered or seconds < _FAIR_SECONDS:
                return None
            self._tally.count(failures=1)
            raise TierUnavailable(f"{self._address} did not answer within {seconds:.2f} s") from error
        except (BaseError, OSError, BaseExceptionGroup) as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not isinstance(first, BaseError | OSError):
                raise
            self._tally.count(failures=1)
            raise self._explain(first) from error

    def _explain(self, error: BaseException) -> TierError:
        text = _first_line(error)
        if "os error 28" in text or "No space left" in text or " 507 " in text:
            return TierFull(f"{self._address} has no room left: {text}")
        return TierUnavailable(f"{self._address} fails: {text}")


def _path(key: Key) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}.safetensors"


async def _read(result: Any, size: int) -> memoryview | None:
    """The content of a get; None if it is not of that size. Reads no more than the announced size."""
    entry = memoryview(await result.bytes_async())
    return entry if len(entry) == size else None


def _first_line(error: BaseException) -> str:
    """First line of an obstore error, without its long appendix and without signatures in URLs."""
    return re.sub(r"\?\S*", "?…", str(error).partition("\n")[0])[:500]
