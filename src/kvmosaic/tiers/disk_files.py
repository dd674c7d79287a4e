"""The calls to the operating system that the disk tier makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class FileSystem(Protocol):
    """Files, as the disk tier needs them; tests put one in between that fails.

    Every call raises `OSError`, as the ones of `os` do. Names are names in the open folder `folder`, an fd.
    """

    def open(self, path: str, flags: int, *, folder: int | None = None) -> int:
        """An fd for this process only. New files can be read by their owner only."""
        ...

    def close(self, fd: int) -> None:
        """Gives the fd back, also if it raises."""
        ...

    def read(self, fd: int, num_bytes: int) -> bytes:
        """At most so many bytes; none at the end of the file."""
        ...

    def write(self, fd: int, data: memoryview) -> int:
        """How many of the bytes were written."""
        ...

    def sync(self, fd: int) -> None:
        """Waits until a file or folder would outlive a power failure."""
        ...

    def flush(self, fd: int) -> None:
        """Raises what closing a file that was written would: some systems write no earlier. It stays open."""
        ...

    def lock(self, fd: int) -> bool:
        """Whether the file is this fd's alone from now on, until it is closed or the process dies; never waits."""
        ...

    def facts(self, fd: int) -> os.stat_result:
        """What is known of an open file."""
        ...

    def facts_of(self, name: str, *, folder: int) -> os.stat_result:
        """What is known of a file; of a link itself, not of where it leads."""
        ...

    def names(self, folder: int) -> list[str]:
        """What is in a folder."""
        ...

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        """Gives a file another name, in one step; a file that has it already is gone then."""
        ...

    def remove(self, name: str, *, folder: int) -> None:
        """Removes a file."""
        ...

    def make_folder(self, path: str) -> None:
        """Makes a folder that its owner only can enter."""
        ...

    def set_time(self, file: int | str, moment: int, *, folder: int | None = None) -> None:
        """Writes down nanoseconds since the epoch as the time of the last change: of an open file, or by name."""
        ...


class RealFiles:
    """The operating system itself."""

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
