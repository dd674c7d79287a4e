"""Refusals: error replies in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmosaic import errors
from kvmosaic.prompt.ways_out import for_clients

MAX_MESSAGE_CHARACTERS = 2_000
"""Messages quote the input; they must not echo all of it."""

# The first matching row decides.
_ROWS: tuple[tuple[type[Exception], int, str | None], ...] = (
    (errors.PromptTooLong, 400, "context_length_exceeded"),
    (errors.InvalidPrompt, 400, None),
    (errors.InvalidConfig, 400, None),
    (errors.UnknownDocument, 404, "document_not_found"),
    (errors.DocumentExists, 409, "document_exists"),
    (errors.DocumentChanged, 412, "document_changed"),
    (errors.DocumentTooLarge, 413, "document_too_large"),
    (errors.DocumentStoreFull, 429, "document_store_full"),
)


class Refusal(Exception):
    """A rejected request: `{"error": {"message", "type", "param", "code"}}` with a status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the reply."""
        message = str(self)
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
        message = message.encode("utf-8", "replace").decode()
        kind = "insufficient_quota" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def refusal_of(error: errors.KVMosaicError, body: Mapping[str, Any] | None = None) -> Refusal:
    """Converts an error about a body to a refusal that names the invalid document's location."""
    status, code = next(((status, code) for kind, status, code in _ROWS if isinstance(error, kind)), (500, None))
    place = error.document if isinstance(error, errors.InvalidPrompt) else None
    documents = (body or {}).get("documents")
    is_listed = place is not None and isinstance(documents, list) and place < len(documents)
    return Refusal(status, for_clients(str(error)), param=f"documents.{place}" if is_listed else None, code=code)
