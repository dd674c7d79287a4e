"""The marker file of a disk tier: claims a folder, with its version."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers.disk.files import FileSystem
from kvmosaic.tiers.disk.names import MARKER, draft_name, is_ours

VERSION = 1
_MAX_BYTES = 4096
_TOLERATED = frozenset(("lost+found",))
"""Found in a new file system."""


def prepare(path: str, files: FileSystem) -> None:
    """Claims a folder: a new one, an empty one, or one claimed already.

    Raises:
        InvalidConfig: no folder, a folder with foreign files in it, or one of another version.
        OSError: it cannot be created, read or marked.
    """
    if os.open not in os.supports_dir_fd:
        raise InvalidConfig("the disk tier needs a POSIX system; use host: or redis: here")
    try:
        fd = _open(path, files)
    except NotADirectoryError as error:
        raise InvalidConfig(f"{path} is a file; a disk tier needs a folder") from error
    try:
        names = files.names(fd)
        if MARKER in names:
            _check(path, fd, files)
            return
        strangers = sorted(name for name in names if not is_ours(name) and name not in _TOLERATED)
        if strangers:
            raise InvalidConfig(
                f"{path} holds what is not of a disk tier ({', '.join(strangers[:3])}); name a new or an empty folder"
            )
        _mark(fd, files)
    finally:
        with contextlib.suppress(OSError):
            files.close(fd)


def _open(path: str, files: FileSystem) -> int:
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
    try:
        return files.open(path, flags)
    except FileNotFoundError:
        for folder in reversed([Path(path), *Path(path).parents]):
            if not folder.is_dir():
                try:
                    files.make_folder(str(folder))
                except FileExistsError:
                    continue
                except FileNotFoundError as error:  # a path such as /proc, where nothing can be created
                    raise InvalidConfig(f"the folder {folder} cannot be made there; name another place") from error
        return files.open(path, flags)


def _check(path: str, folder: int, files: FileSystem) -> None:
    fd = files.open(MARKER, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), folder=folder)
    try:
        text = files.read(fd, _MAX_BYTES)
    finally:
        files.close(fd)
    try:
        marker = json.loads(text)
        version = marker["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{path}/{MARKER} is damaged; remove it if the folder is a disk tier") from error
    if version != VERSION:
        raise InvalidConfig(
            f"{path} is a disk tier of version {str(version)[:20]}, and this program knows version {VERSION}; "
            "name another folder"
        )


def _mark(folder: int, files: FileSystem) -> None:
    name = draft_name("kvmosaic-tier")
    try:
        fd = files.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder=folder)
        try:
            text = memoryview(json.dumps({"version": VERSION}).encode())
            if files.write(fd, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            files.sync(fd)
        finally:
            files.close(fd)
        files.rename(name, MARKER, folder=folder, new_folder=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(name, folder=folder)
        raise
