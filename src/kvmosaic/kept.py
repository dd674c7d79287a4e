"""What takes long to work out of files, kept for the next start.

It lies in the user's cache folder, or in `KVMOSAIC_CACHE_DIR` ("none": nothing is kept), under the digest of what it
was worked out of. Whatever cannot be written or read is worked out again.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from blake3 import blake3

VARIABLE = "KVMOSAIC_CACHE_DIR"
MAX_KEPT = 16
"""Folders of a kind; older ones leave."""

logger = logging.getLogger("kvmosaic")


def kept_folder(kind: str, *sources: bytes) -> Path | None:
    """Where something of a kind is kept that was made of these sources alone; None: nowhere."""
    home = os.environ.get(VARIABLE, "")
    if not home:
        try:
            from platformdirs import user_cache_dir
        except ImportError:
            return None
        home = user_cache_dir("kvmosaic", appauthor=False)
    if home == "none":
        return None
    digest = blake3()
    for source in sources:
        digest.update(len(source).to_bytes(8, "little"))
        digest.update(source)
    return Path(home) / kind / digest.hexdigest()[:32]


def keep(folder: Path | None, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a new folder, which then gets its name at once; the oldest of its kind leave.

    Whatever goes wrong, an error of `write` included, is logged for debugging, and nothing is kept.
    """
    if folder is None:
        return
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=".") as draft:
            (new := Path(draft) / "new").mkdir()
            write(new)
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            new.rename(folder)
        found = sorted(folder.parent.glob("[!.]*"), key=lambda path: path.stat().st_mtime)
        for old in found[:-MAX_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        logger.debug("nothing is kept in %s: %s", folder, error)
