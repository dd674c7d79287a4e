"""Model loading beside the event loop: torch, the model, and the app over it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvmosaic.errors import InvalidConfig, TierError
from kvmosaic.server.settings import ServerSettings
from kvmosaic.tiers import Tier, open_tier

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kvmosaic.llm import LLM
    from kvmosaic.server.services import Services

T = TypeVar("T")


def open_places(settings: ServerSettings) -> list[Tier]:
    """Opens the tiers of these settings, fastest first, before any model is loaded.

    Raises:
        InvalidConfig: a tier that cannot be used, or a package that is missing.
    """
    with contextlib.ExitStack() as undo:
        try:
            tiers = [undo.enter_context(contextlib.closing(open_tier(url))) for url in settings.tier_urls]
        except TierError as error:
            raise InvalidConfig(f"--chunk-tier: {error}") from error
        undo.pop_all()
    return tiers


def close_places(tiers: Iterable[Tier]) -> None:
    """Closes opened tiers."""
    for tier in tiers:
        tier.close()


def load_llm(settings: ServerSettings, tiers: Sequence[Tier] | None = None) -> LLM:
    """Loads the model of these settings with its caches, and checks it.

    Args:
        settings: settings of the server.
        tiers: the opened tiers of the settings; None: open them here.

    Raises:
        KVMosaicError: it cannot be loaded, or a setting does not fit it.
    """
    from kvmosaic.llm import LLM
    from kvmosaic.model import quiet_libraries

    quiet_libraries()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the chunk cache is off")  # shown when the server is ready
        llm = LLM(settings.model, **settings.llm_config(tiers).keywords())
    if llm.engine.offloader is None and tiers:  # the model has no chunks that could be offloaded
        close_places(tiers)
    return llm


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs something long in a thread that the process need not wait for at its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not done.cancelled():
            set_outcome(outcome)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], object]
        try:
            outcome = done.set_result, work()
        except BaseException as error:
            outcome = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="kvmosaic-load", daemon=True).start()
    return done


def load(settings: ServerSettings, tiers: Sequence[Tier]) -> tuple[Services, FastAPI]:
    """Loads the model and builds the app over it; importing torch alone takes seconds."""
    import anyio

    from kvmosaic.server.app import build_app
    from kvmosaic.server.services import build_services

    services = build_services(settings, load_llm(settings, tiers))
    app = build_app(services)
    anyio.run(anyio.sleep, 0)  # imports its backend here; the first stream would do it on the event loop
    gc.collect()
    gc.freeze()  # permanent objects are not scanned by the garbage collector while requests wait
    return services, app
