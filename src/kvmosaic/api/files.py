"""Replies of /v1/files: uploaded files, which are stored documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from kvmosaic.api.fields import Reply
from kvmosaic.documents import StoredDocument

FILE_PREFIX = "file-"
"""Beginning of the ids of files."""
Purpose = Literal["assistants", "user_data"]


class FileObject(Reply):
    """A file, as OpenAI's clients read it; its id is that of a stored document with its text."""

    id: str
    object: Literal["file"] = "file"
    bytes: Annotated[int, Field(description="Of the file that was sent.")]
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, document: StoredDocument) -> FileObject:
        """Describes a stored document that came as a file."""
        metadata = document.metadata
        return cls(
            id=document.id,
            bytes=int(metadata["bytes"]),
            created_at=int(document.created_at),
            expires_at=None if document.expires_at is None else int(document.expires_at),
            filename=metadata["filename"],
            purpose=metadata["purpose"],
        )


def is_file(document: StoredDocument) -> bool:
    """Whether a stored document came through /v1/files, and still has its metadata."""
    size = document.metadata.get("bytes", "")
    is_size = size.isascii() and size.isdigit() and len(size) <= 18
    return is_size and document.id.startswith(FILE_PREFIX) and {"filename", "purpose"} <= document.metadata.keys()


class FileList(Reply):
    """Some files in the order of creation."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, files: Sequence[StoredDocument], has_more: bool) -> FileList:
        """Describes one page of files."""
        data = [FileObject.of(file) for file in files]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=has_more)


class DeletedFile(Reply):
    """What is left of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
