"""Files of a disk tier: their names, the marker file that claims its folder, and file system calls."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from functools import cache
from hashlib import sha256
from pathlib import Path

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers.tier import MAX_KEY_BYTES


class RealFiles:
    """The operating system's file calls; tests substitute failing ones.

    Every call raises `OSError`, like its counterpart in `os`. Names are relative to the open folder `folder`, an fd.
    """

    def open(self, path: str, flags: int, *, folder: int | None = None) -> int:
        """An fd for this process only. New files are readable by their owner only."""
        return os.open(path, flags, 0o600, dir_fd=folder)

    def close(self, fd: int) -> None:
        """Closes the fd, also if it raises."""
        os.close(fd)

    def read(self, fd: int, num_bytes: int) -> bytes:
        """At most `num_bytes` bytes; none at the end of the file."""
        return os.read(fd, num_bytes)

    def write(self, fd: int, data: memoryview) -> int:
        """Writes; returns the number of bytes written."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Waits until a file or folder would survive a power failure."""
        os.fsync(fd)

    def flush(self, fd: int) -> None:
        """Raises what closing a written file would: some systems write no earlier. The fd stays open."""
        os.close(os.dup(fd))

    def lock(self, fd: int) -> bool:
        """Locks the file exclusively until it is closed or the process dies; returns whether it did; never waits."""
        import fcntl  # not on every system on which this module is imported

        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def facts(self, fd: int) -> os.stat_result:
        """`fstat` of an open file."""
        return os.fstat(fd)

    def facts_of(self, name: str, *, folder: int) -> os.stat_result:
        """`lstat` of a file; does not follow links."""
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def names(self, folder: int) -> list[str]:
        """Names of the files in a folder."""
        return os.listdir(folder)

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        """Renames a file atomically; replaces an existing file."""
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)

    def remove(self, name: str, *, folder: int) -> None:
        """Removes a file."""
        os.unlink(name, dir_fd=folder)

    def make_folder(self, path: str) -> None:
        """Makes a folder that only its owner can enter."""
        Path(path).mkdir(0o700)

    def set_time(self, file: int | str, moment: int, *, folder: int | None = None) -> None:
        """Sets the modification time in nanoseconds since the epoch: of an open file, or by name."""
        if isinstance(file, int):
            os.utime(file, ns=(moment, moment))
        else:
            os.utime(file, ns=(moment, moment), dir_fd=folder, follow_symlinks=False)


MARKER = ".kvmosaic-tier.json"
"""The marker file, with the version. Hidden, so that `rm -r folder/*` empties the tier and no more."""
QUARANTINE = "quarantine"
SHARDS = tuple(f"{first:02x}" for first in range(256))
"""The folders of entries: the first byte of their key in hex."""

_HEX = f"(?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}}"
_ENTRY = re.compile(rf"({_HEX})\.safetensors")
_DRAFT = re.compile(rf"\.(?:{_HEX}|kvmosaic-tier)(?:\.([0-9a-f]{{16}}))?\.[0-9a-f]{{16}}\.partial")
_ASIDE = re.compile(rf"{_HEX}\.([0-9a-f]{{16}})\.safetensors")
MARKER_VERSION = 1
_MAX_MARKER_BYTES = 4096
_TOLERATED = frozenset(("lost+found",))
"""Found in a new file system."""


def shard_of(key: Key) -> str:
    """The shard (folder) of an entry."""
    return key[:1].hex()


def entry_name(key: Key) -> str:
    """The file name of an entry; hexadecimal digits only, for any key."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, got {len(key)}")
    return f"{key.hex()}.safetensors"


def key_of(name: str, shard: str) -> Key | None:
    """The key of the entry in this file; None for other files: of another shard, or not ours."""
    match = _ENTRY.fullmatch(name)
    return Key(bytes.fromhex(match[1])) if match is not None and match[1].startswith(shard) else None


def draft_name(subject: str, host: str = "") -> str:
    """A unique name for a file in progress; `host` as returned by `this_host`."""
    return f".{subject}.{host}{'.' if host else ''}{secrets.token_hex(8)}.partial"


def host_of(name: str) -> str:
    """The host that writes, or wrote, a draft; empty if its name does not say."""
    match = _DRAFT.fullmatch(name)
    return "" if match is None or match[1] is None else match[1]


@cache
def this_host() -> str:
    """16 hexadecimal digits shared by all processes under this kernel until reboot, and by no others.

    Empty where the system does not provide it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return ""
    return sha256(boot).hexdigest()[:16]


def is_draft(name: str) -> bool:
    """Whether a file is a draft, in progress or stale."""
    return _DRAFT.fullmatch(name) is not None


def aside_name(key: Key, moment: int) -> str:
    """The file name of an entry in quarantine; `moment` in nanoseconds."""
    return f"{key.hex()}.{moment:016x}.safetensors"


def moment_of(name: str) -> str | None:
    """When a file entered quarantine, as text that sorts; None for files that are not ours."""
    match = _ASIDE.fullmatch(name)
    return None if match is None else match[1]


def is_ours(name: str) -> bool:
    """Whether a name at the top of a folder can be ours."""
    return name in SHARDS or name in (MARKER, QUARANTINE) or is_draft(name)


def prepare(path: str, files: RealFiles) -> None:
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


def _open(path: str, files: RealFiles) -> int:
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


def _check(path: str, folder: int, files: RealFiles) -> None:
    fd = files.open(MARKER, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), folder=folder)
    try:
        text = files.read(fd, _MAX_MARKER_BYTES)
    finally:
        files.close(fd)
    try:
        marker = json.loads(text)
        version = marker["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{path}/{MARKER} is damaged; remove it if the folder is a disk tier") from error
    if version != MARKER_VERSION:
        raise InvalidConfig(
            f"{path} is a disk tier of version {str(version)[:20]}, and this program knows version {MARKER_VERSION}; "
            "name another folder"
        )


def _mark(folder: int, files: RealFiles) -> None:
    name = draft_name("kvmosaic-tier")
    try:
        fd = files.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder=folder)
        try:
            text = memoryview(json.dumps({"version": MARKER_VERSION}).encode())
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
