"""File system calls of the disk tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class FileSystem(Protocol):
    """File operations of the disk tier; tests substitute a failing one.

    Every call raises `OSError`, like its counterpart in `os`. Names are relative to the open folder `folder`, an fd.
    """

    def open(self, path: str, flags: int, *, folder: int | None = None) -> int:
        """An fd for this process only. New files are readable by their owner only."""
        ...

    def close(self, fd: int) -> None:
        """Closes the fd, also if it raises."""
        ...

    def read(self, fd: int, num_bytes: int) -> bytes:
        """At most `num_bytes` bytes; none at the end of the file."""
        ...

    def write(self, fd: int, data: memoryview) -> int:
        """Writes; returns the number of bytes written."""
        ...

    def sync(self, fd: int) -> None:
        """Waits until a file or folder would survive a power failure."""
        ...

    def flush(self, fd: int) -> None:
        """Raises what closing a written file would: some systems write no earlier. The fd stays open."""
        ...

    def lock(self, fd: int) -> bool:
        """Locks the file exclusively until it is closed or the process dies; returns whether it did; never waits."""
        ...

    def facts(self, fd: int) -> os.stat_result:
        """`fstat` of an open file."""
        ...

    def facts_of(self, name: str, *, folder: int) -> os.stat_result:
        """`lstat` of a file; does not follow links."""
        ...

    def names(self, folder: int) -> list[str]:
        """Names of the files in a folder."""
        ...

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        """Renames a file atomically; replaces an existing file."""
        ...

    def remove(self, name: str, *, folder: int) -> None:
        """Removes a file."""
        ...

    def make_folder(self, path: str) -> None:
        """Makes a folder that only its owner can enter."""
        ...

    def set_time(self, file: int | str, moment: int, *, folder: int | None = None) -> None:
        """Sets the modification time in nanoseconds since the epoch: of an open file, or by name."""
        ...


class RealFiles:
    """The operating system's file calls."""

    def open(self, path: str, flags: int, *, folder: int | None = None) -> int:
        """See `FileSystem.open`."""
        return os.open(path, flags, 0o600, dir_fd=folder)

    def close(self, fd: int) -> None:
        """See `FileSystem.close`."""
        os.close(fd)

    def read(self, fd: int, num_bytes: int) -> bytes:
        """See `FileSystem.read`."""
        return os.read(fd, num_bytes)

    def write(self, fd: int, data: memoryview) -> int:
        """See `FileSystem.write`."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """See `FileSystem.sync`."""
        os.fsync(fd)

    def flush(self, fd: int) -> None:
        """See `FileSystem.flush`."""
        os.close(os.dup(fd))

    def lock(self, fd: int) -> bool:
        """See `FileSystem.lock`."""
        import fcntl  # not on every system on which this module is imported

        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def facts(self, fd: int) -> os.stat_result:
        """See `FileSystem.facts`."""
        return os.fstat(fd)

    def facts_of(self, name: str, *, folder: int) -> os.stat_result:
        """See `FileSystem.facts_of`."""
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def names(self, folder: int) -> list[str]:
        """See `FileSystem.names`."""
        return os.listdir(folder)

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        """See `FileSystem.rename`."""
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)

    def remove(self, name: str, *, folder: int) -> None:
        """See `FileSystem.remove`."""
        os.unlink(name, dir_fd=folder)

    def make_folder(self, path: str) -> None:
        """See `FileSystem.make_folder`."""
        Path(path).mkdir(0o700)

    def set_time(self, file: int | str, moment: int, *, folder: int | None = None) -> None:
        """See `FileSystem.set_time`."""
        if isinstance(file, int):
            os.utime(file, ns=(moment, moment))
        else:
            os.utime(file, ns=(moment, moment), dir_fd=folder, follow_symlinks=False)
