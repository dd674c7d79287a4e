"""Replies of /v1/documents:batch, which stores many documents, and the lines of its body."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvmosaic.api.errors import ErrorDetail
from kvmosaic.api.fields import Reply

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some programs write at the beginning of a UTF-8 file."""
UploadStatus = Literal["stored", "replaced", "refused"]


class LineBuffer:
    """Cuts a body that comes in pieces into lines; a line that is too long is skipped to its end.

    Holds at most one line and the pieces not yet taken. Each byte is looked at once.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._lines: list[tuple[int, bytes | None]] = []
        self._rest = bytearray()
        self._is_skipping = False
        self.num_lines = 0
        """Lines that have ended, blank ones among them."""
        self.num_bytes = 0
        """Bytes of the lines that can be taken."""

    def feed(self, piece: bytes) -> None:
        """Adds the next piece of the body."""
        first, *others = piece.split(b"\n")
        self._extend(first)
        for part in others:
            self._end_line()
            self._extend(part)

    def finish(self) -> None:
        """Ends the last line, which may have no line break."""
        self._end_line()

    @property
    def num_waiting(self) -> int:
        """Lines that can be taken."""
        return len(self._lines)

    def take(self) -> list[tuple[int, bytes | None]]:
        """Returns the whole lines so far that are not blank, with their numbers from 1; None: one that is too long."""
        lines, self._lines, self.num_bytes = self._lines, [], 0
        return lines

    def _extend(self, part: bytes) -> None:
        if self._is_skipping:
            return
        self._rest += part
        if len(self._rest) > self._max_line_bytes:
            self._is_skipping = True
            self._rest.clear()

    def _end_line(self) -> None:
        self.num_lines += 1
        line = bytes(self._rest).strip()
        if self.num_lines == 1:
            line = line.removeprefix(BYTE_ORDER_MARK).strip()
        if self._is_skipping or line:
            self._lines.append((self.num_lines, None if self._is_skipping else line))
            self.num_bytes += len(line)
        self._rest.clear()
        self._is_skipping = False


class UploadedDocument(Reply):
    """What became of one line or file."""

    line: Annotated[int | None, Field(description="Number of the line, from 1; null: it was a file.")]
    file: Annotated[str | None, Field(description="Name of the file; null: it was a line.")]
    id: str | None
    status: UploadStatus
    version: Annotated[int | None, Field(description="What is stored now; null: it was refused.")]
    error: Annotated[ErrorDetail | None, Field(description="Why it was refused.")]
    tokens: Annotated[
        int | None, Field(description="Of a replaced text, where the earlier one is cached: tokens of the new one.")
    ] = None
    kept_tokens: Annotated[
        int | None, Field(description="Of these, the tokens before the edit, which the next read does not compute.")
    ] = None


class UploadSummary(Reply):
    """What became of all lines and files, in their order."""

    object: Literal["documents.uploaded"] = "documents.uploaded"
    num_stored: int = 0
    num_replaced: int = 0
    num_refused: int = 0
    data: list[UploadedDocument] = Field(default_factory=list)

    @classmethod
    def empty(cls) -> UploadSummary:
        """The summary of no document, with every field set."""
        return cls(object="documents.uploaded", num_stored=0, num_replaced=0, num_refused=0, data=[])

    def add(self, uploaded: UploadedDocument) -> None:
        """Adds and counts one."""
        self.data.append(uploaded)
        self.num_stored += uploaded.status == "stored"
        self.num_replaced += uploaded.status == "replaced"
        self.num_refused += uploaded.status == "refused"
