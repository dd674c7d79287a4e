"""Settings of stored documents, of our server and of vLLM's with our plugin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvmosaic.config.setting import setting, validate_settings

MAX_SECONDS = 366 * 86_400
MAX_URL_CHARACTERS = 2_048

_documents = partial(setting, panel="Documents")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where documents are stored, how many, how long, and the largest body that may hold some."""

    documents_dir: str | None = _documents(
        None,
        max_length=MAX_URL_CHARACTERS,
        metavar="DIR",
        unset="kvmosaic/documents in the user's data folder",
        help="Folder of stored documents, which servers of one machine may share; none: in memory.",
    )
    documents_url: str | None = _documents(
        None,
        is_secret=True,
        max_length=MAX_URL_CHARACTERS,
        help="PostgreSQL database of stored documents, for servers of several machines: "
        "postgresql://USER:PASSWORD@HOST/NAME.",
    )
    document_ttl: int | None = _documents(
        None, low=1, high=MAX_SECONDS, off="unlimited", help="Default TTL of stored documents in seconds."
    )
    document_version_seconds: int = _documents(
        3_600,
        low=0,
        high=MAX_SECONDS,
        help="Seconds after its last use for which a replaced text can be read by its version; 0: none.",
    )
    max_documents: int = _documents(10_000, low=1, high=10**6, help="Maximum stored documents of one tenant.")
    max_documents_bytes: int = _documents(2**28, low=1, high=2**40, help="Maximum bytes of stored texts of one tenant.")
    max_body_bytes: int = setting(2**24, panel="Limits", low=1_024, high=2**30, help="Maximum bytes of a request body.")

    def __post_init__(self) -> None:
        validate_settings(self)
