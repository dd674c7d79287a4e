"""Setting: whether requests get copies of their documents, or read them where they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from kvmosaic.errors import InvalidConfig

SETTING = "document_reads"
"""The same name as the flag of `kvmosaic vllm serve`."""
VARIABLE = "KVMOSAIC_DOCUMENT_READS"
"""Read in every process of vLLM: attention is chosen before any of our parts has vLLM's configuration."""
DocumentReads = Literal["copy", "in-place"]


def document_reads(environ: Mapping[str, str]) -> DocumentReads:
    """The setting; "copy" if it is unset.

    Raises:
        InvalidConfig: another value.
    """
    said = environ.get(VARIABLE) or "copy"
    for known in get_args(DocumentReads):
        if said == known:
            return known  # type: ignore[no-any-return]
    raise InvalidConfig(f"{VARIABLE} is {said!r:.80}; choose 'copy' or 'in-place'")
