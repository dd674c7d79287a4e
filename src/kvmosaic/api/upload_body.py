"""Bodies of uploads, which routes read in pieces: counted, and given up when nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvmosaic.api.errors import ApiError

PAUSE_SECONDS = 60.0
"""Longest wait for the next piece of a body."""
MAX_UPLOADS = 8
"""Maximum number of uploads in progress."""
CLOSE = {"Connection": "close"}

Message = MutableMapping[str, Any]


class UploadBody:
    """The `receive` of a request whose route reads the body itself."""

    def __init__(
        self,
        receive: Callable[[], Awaitable[Message]],
        max_bytes: int,
        setting: str,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """`setting`: what the operator calls `max_bytes`, for errors."""
        self._receive = receive
        self._max_bytes = max_bytes
        self._setting = setting
        self._pause_seconds = pause_seconds
        self._num_bytes = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        """The next piece; after the last one, the client's messages.

        Raises:
            ApiError: 408, nothing came for too long; 413, the body is too long.
        """
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._pause_seconds):
                message = await self._receive()
        except TimeoutError:
            told = f"nothing of the body came for {self._pause_seconds:g} s; what was read before is stored"
            raise ApiError(408, told, code="body_timeout", headers=CLOSE) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            limit = f"{self._max_bytes} bytes ({self._setting})"
            told = f"the body is longer than {limit}; send it in parts. What was read before is stored"
            raise ApiError(413, told, code="body_too_large", headers=CLOSE)
        self._is_whole = not message.get("more_body", False)
        return message
