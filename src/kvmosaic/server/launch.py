"""Server process: listen, load, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from kvmosaic.errors import InvalidConfig, KVMosaicError
from kvmosaic.server.middleware import StartupMiddleware
from kvmosaic.server.model_loader import close_places, in_daemon_thread, load, open_places
from kvmosaic.server.process.listener import CLOSING_SECONDS, address_of, listen, listener_for, trimmed_heap
from kvmosaic.server.process.logs import progress_bar, set_up_logs
from kvmosaic.server.read import flag_of, read_settings
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants.keys import is_open_to_all
from kvmosaic.tiers import Tier, TierStat
from kvmosaic.tiers.tiered_store import PUT_SECONDS

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvmosaic.documents import DocumentStore
    from kvmosaic.llm import LLM
    from kvmosaic.server.services import Services

T = TypeVar("T")
logger = logging.getLogger("kvmosaic.server")

SWITCH_SECONDS = 0.0005
WARM_LINE_SECONDS = 20.0
"""Between two lines on documents that are computed, where there is no terminal for a bar."""
_BYTES_PER_TOKEN = 4
"""What a token of text takes, about: for the estimate at the start."""
GRACE_SECONDS = 10.0
"""Seconds after draining, writing to the tiers and reading replies until a process that still runs is ended."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOAD_SIGNAL = getattr(signal, "SIGHUP", None)
"""None where the system has no such signal."""


def launch(
    settings: ServerSettings,
    read: Callable[[], ServerSettings] = read_settings,
    fill: Callable[[Services], Awaitable[str]] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains running requests; a second signal ends the process at once.

    At SIGHUP it reads the settings again, and applies what can change.

    Args:
        settings: settings of the server.
        read: reads them again, from the same flags, variables and file.
        fill: stores the files and folders that `settings.documents` names, and says what became of them.

    Raises:
        InvalidConfig: these settings cannot be served: the port is taken, the certificate is bad, …
        KVMosaicError: the model cannot be loaded.
    """
    # The event loop shares one interpreter with the engine's thread. Waiting 5 ms for it at every turn, as is usual,
    # adds up to seconds when many clients come at once.
    sys.setswitchinterval(SWITCH_SECONDS)
    _allow_connections()
    settings.access_keys()  # reports a bad keys file before anything is loaded
    _check_documents(settings)
    tiers = open_places(settings)
    with _Signals(settings.drain_seconds + PUT_SECONDS + CLOSING_SECONDS + GRACE_SECONDS) as signals:
        try:
            has_ended = asyncio.run(_Launch(settings, read, tiers, signals, fill).run())
        finally:
            close_places(tiers)  # once more, if all went well
    if not has_ended:
        # a thread still loads the model, or reads a long prompt: it cannot be stopped, and no request needs it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _check_documents(settings: ServerSettings) -> None:
    """Opens the stored documents once, before anything is loaded, and looks for the files that are to be stored."""
    from kvmosaic.documents import DocumentStore

    for path in settings.documents:
        if not Path(path).exists():
            raise InvalidConfig(f"DOCUMENTS: there is no file or folder {path!r:.400}")
    if settings.documents and len({key.tenant.name for key in settings.access_keys()}) > 1:
        raise InvalidConfig("DOCUMENTS: this server has several tenants; give each its own: kvmosaic documents sync")

    DocumentStore(settings.document_place()).close()


def _allow_connections() -> None:
    """Raises the limit of file descriptors to the maximum: each connection needs one, and 1,024 is a common default."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # there are no such limits, or they are fixed
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Signals:
    """Calls back on the event loop on a signal to stop or to reload, and ends the process if stopping takes too long.

    Python calls these handlers between two instructions of the main thread, so a second signal and the deadline end a
    process whose event loop hangs, too; a callback of the event loop would wait for it. The thread of the deadline runs
    from the start: a handler that starts a thread may interrupt the start of another one.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` count from the first signal to the end of the process."""
        self._seconds = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_to_stop, self._has_ended = threading.Event(), threading.Event()
        self._deadline = threading.Thread(target=self._wait, name="kvmosaic-deadline", daemon=True)

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        if RELOAD_SIGNAL is not None and signal.getsignal(RELOAD_SIGNAL) is not signal.SIG_IGN:  # as with nohup
            self._before[RELOAD_SIGNAL] = signal.signal(RELOAD_SIGNAL, self._handle)
        self._deadline.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._has_ended.set()
        self._told_to_stop.set()
        self._deadline.join()

    def listen(self, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        """Calls `stop` on the running event loop at the first stop signal, and `reload` at every SIGHUP."""
        self._on_stop, self._on_reload = stop, reload
        self._loop = asyncio.get_running_loop()
        if self._told_to_stop.is_set():
            stop()

    def ignore(self) -> None:
        """Reverts `listen`."""
        self._loop = None

    def stop(self, number: int) -> None:
        """Does what a stop signal does: the second one ends the process at once."""
        if self._told_to_stop.is_set():
            os._exit(128 + number)
        self._told_to_stop.set()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_stop)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != RELOAD_SIGNAL:
            self.stop(number)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_reload)

    def _wait(self) -> None:
        self._told_to_stop.wait()
        if self._has_ended.wait(self._seconds):
            return
        with contextlib.suppress(OSError):  # neither a lock nor a full pipe may keep the process from ending
            if select.select((), (2,), (), 0.0)[1]:
                os.write(2, f"killed: it did not stop within {self._seconds:g} s\n".encode())
        os._exit(1)


class _Launch:
    """Lifecycle of the server process.

    listening (not ready) ──▶ loaded (ready) ──▶ stop signal: draining (not ready) ──▶ closed
    """

    def __init__(
        self,
        settings: ServerSettings,
        read: Callable[[], ServerSettings],
        tiers: Sequence[Tier],
        signals: _Signals,
        fill: Callable[[Services], Awaitable[str]] | None,
    ) -> None:
        self._fill = fill
        self._settings = settings
        self._read = read
        self._has_terminal = _has_terminal()
        self._services: Services | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._signals = signals
        self._tiers = tiers
        self._writes_json = settings.log_format == "json"
        self._notices = Console(stderr=True, quiet=self._writes_json)
        self._startup = StartupMiddleware()
        self._told_to_stop = asyncio.Event()
        self._listener = listener_for(self._startup, settings)

    @trimmed_heap()
    async def run(self) -> bool:
        """Runs until shutdown; returns False if a thread is still busy, which would keep the process from exiting."""
        place = listen(self._settings)
        address = address_of(self._settings, place)
        set_up_logs(self._settings.uvicorn_log_level, self._settings.log_format)
        self._signals.listen(self._told_to_stop.set, self._reload)
        serving = asyncio.create_task(self._listener.serve(sockets=[place]), name="listener")
        try:
            self._say(f"loading    {self._settings.model}, at {address}")
            loaded = await self._load()
            if loaded is None:
                return False
            from kvmosaic.server.documents.cached import swept  # imports torch

            services, app = loaded
            self._services = services
            async with swept(services):
                if self._settings.documents and self._fill is not None:
                    stored = await self._unless_stopped(asyncio.ensure_future(self._fill(services)))
                    if stored is None:
                        await services.close()
                        return False
                    self._say(f"files      {stored}")
                self._startup.open(app, services.tenants)
                self._describe(services)
                self._say(f"ready      {address}")
                warming = asyncio.create_task(self._warm(services), name="warm-on-start")
                await self._told_to_stop.wait()
                warming.cancel()
                await asyncio.wait((warming,))  # it is no request that would be drained
                await self._drain(services)
            return not services.threads.is_working
        finally:
            self._listener.should_exit = True
            await serving
            self._signals.ignore()

    def _reload(self) -> None:
        if self._has_terminal and not _has_terminal():  # it was closed, and the server ends with it
            self._signals.stop(signal.SIGHUP)
        elif self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload_settings(), name="reload")

    async def _reload_settings(self) -> None:
        if self._services is None:
            logger.warning("settings were not reloaded: the model is still being loaded; send SIGHUP again")
            return
        try:
            settings = await asyncio.to_thread(self._read)
            changed, unchanged = await self._services.reload(settings)
        except KVMosaicError as error:
            logger.error("settings were not reloaded, and stay as they are: %s", error)
            return
        self._settings = self._services.settings
        set_up_logs(self._settings.uvicorn_log_level, self._settings.log_format)
        logger.info("keys and settings reloaded%s", f"; changed: {', '.join(map(flag_of, changed))}" if changed else "")
        if unchanged:
            logger.warning("settings that need a restart: %s", ", ".join(map(flag_of, unchanged)))

    async def _load(self) -> tuple[Services, ASGIApp] | None:
        """Loads the model; None if stopped before it is loaded."""
        with self._notices.status(f"loading {self._settings.model}"):
            return await self._unless_stopped(in_daemon_thread(lambda: load(self._settings, self._tiers)))

    async def _unless_stopped(self, work: asyncio.Future[T]) -> T | None:
        """Returns the result of `work`; None if a signal to stop comes first."""
        stopping = asyncio.create_task(self._told_to_stop.wait())
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if work.done():
            return work.result()
        work.cancel()
        return None

    async def _drain(self, services: Services) -> None:
        services.admission.is_draining = True
        under_way, seconds = services.admission.num_under_way, self._settings.drain_seconds
        if services.engine.is_asleep:  # queued requests cannot run
            seconds = 0.0
        self._say(_stopping(under_way, seconds))
        if not await services.admission.drained(seconds):
            self._say(f"stopping: aborted {_requests(services.admission.num_under_way)}")
        await services.close()

    async def _warm(self, services: Services) -> None:
        """Computes stored documents, if the settings say so."""
        if not (self._settings.warm_on_start or self._settings.documents) or not services.llm.has_chunk_cache:
            return
        from kvmosaic.server.documents.served import warm_stored  # imports torch

        try:
            self._say("           documents are computed meanwhile; requests go first")
            last = time.monotonic()
            with progress_bar(self._notices) as bar:
                task = bar.add_task("computing documents", total=None)

                def show(done: int, total: int) -> None:
                    nonlocal last
                    bar.update(task, completed=done, total=total)
                    if bar.disable and time.monotonic() > last + WARM_LINE_SECONDS:
                        last = time.monotonic()
                        self._say(f"           {done:,} of {total:,} documents are computed")

                told = await warm_stored(services, show)
            self._say(f"computed   {told}")
        except Exception:  # the server goes on without them
            logger.exception("stored documents are not computed at the start")

    def _describe(self, services: Services) -> None:
        from kvmosaic.assembly import BUNDLED_READER  # loaded with the model

        llm, settings = services.llm, self._settings
        self._say(f"model      {', '.join(settings.model_names)}: {llm.engine_facts}, on {llm.engine_facts.device}")
        if llm.model.weights_note and llm.engine_facts.name == "transformers":
            self._say(f"weights    {llm.model.weights_note}")
        if settings.model == BUNDLED_READER:
            self._say("           a toy for examples; try kvmosaic serve Qwen/Qwen2.5-1.5B-Instruct, or a GGUF file")
        off = f"the chunk cache is off: {llm.chunk_cache_off_reason}"
        self._say(f"documents  {_room(llm, services.documents) if llm.has_chunk_cache else off}")
        if llm.profile is not None:
            chosen = f"{llm.chunk_cache_config.position_strategy} positions, repair {llm.engine.placer.first_repair}"
            self._say(f"profile    of {llm.profile.date}: {chosen}")
        if (offloader := llm.engine.offloader) is not None:
            stats = offloader.tiered_store.tier_stats()
            self._say(f"tiers      {' ▸ '.join(_shown_tier(stat) for stat in stats)}")
        if settings.otlp_traces_endpoint is not None:
            self._say(f"traces     {settings.otlp_traces_endpoint}")
        if services.tenants.needs_key:
            self._say("API key    needed")
        if settings.keys_file is not None and is_open_to_all(settings.keys_file):
            self._say(f"warning    everybody on this machine may read {settings.keys_file}; chmod 600 it")

    def _say(self, line: str) -> None:
        if self._writes_json:
            logger.info(" ".join(line.split()))
        self._notices.print(line, markup=False, highlight=False, soft_wrap=True)


def _room(llm: LLM, documents: DocumentStore) -> str:
    """What the chunk cache holds: "250 stored, about 100 fit (room for 46,592 tokens, 2 GiB)"."""
    kv_cache, usage = llm.engine.kv_cache, documents.usage()
    block, count = kv_cache.chunk_pool.block_size, kv_cache.chunk_pool.num_blocks
    size = f"{count * block:,} tokens, {_shown_size(count * kv_cache.bytes_per_block)}"
    if not usage.num_documents:
        return f"none stored; room for {size}"
    tokens_of_one = usage.num_bytes / usage.num_documents / _BYTES_PER_TOKEN + block / 2  # half of the last block
    copies = 2 if llm.chunk_cache_config.context_in() == "companions" else 1  # the first of a prompt, or a later one
    fitting = int(count * block / (copies * tokens_of_one))
    fits = "all" if fitting >= usage.num_documents else f"about {float(f'{fitting:.2g}'):,.0f}"
    return f"{usage.num_documents:,} stored, {fits} fit (room for {size})"


def _shown_tier(tier: TierStat) -> str:
    """Returns a tier in a few words: its kind, its place without passwords, its capacity."""
    size = tier.quota_bytes
    if size is None:
        return f"{tier.name} {tier.address}"
    return f"{tier.name} {tier.address}".strip() + f" ({_shown_size(size)})"


def _shown_size(num_bytes: int) -> str:
    """Returns a quota as text; one below 1 MiB, mostly a forgotten unit, in bytes."""
    if num_bytes < 2**20:
        return f"{num_bytes:,} bytes"
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"


def _has_terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


def _stopping(under_way: int, seconds: float) -> str:
    if not under_way:
        return "stopping: nothing is under way"
    return f"stopping: {_requests(under_way)} under way may take {seconds:g} s; a second signal ends them now"
