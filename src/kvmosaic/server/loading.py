"""Loading the model beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from typing import TYPE_CHECKING

from kvmosaic.server.settings import ServerSettings

if TYPE_CHECKING:
    from kvmosaic.llm import LLM


def load_llm(settings: ServerSettings) -> LLM:
    """The model of these settings with its caches, checked.

    Raises:
        KVMosaicError: it cannot be loaded, or a setting does not fit it.
    """
    from kvmosaic.llm import LLM
    from kvmosaic.model.quiet import quiet_libraries

    quiet_libraries()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the chunk cache is off")  # said when the server is ready
        return LLM(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            enable_chunk_cache=settings.enable_chunk_cache,
            chunk_cache_config=settings.chunk_cache_config(),
            engine_config=settings.engine_config(),
            trust_remote_code=settings.trust_remote_code,
        )


def load_in_thread(settings: ServerSettings) -> asyncio.Future[LLM]:
    """Loads beside the event loop, in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[LLM] = loop.create_future()

    def settle(llm: LLM | None, error: BaseException | None) -> None:
        if loaded.cancelled():
            return
        if error is not None:
            loaded.set_exception(error)
        elif llm is not None:
            loaded.set_result(llm)

    def load() -> None:
        llm, failure = None, None
        try:
            llm = load_llm(settings)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(settle, llm, failure)

    threading.Thread(target=load, name="kvmosaic-load", daemon=True).start()
    return loaded
