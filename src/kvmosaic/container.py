"""Limits: of memory, of threads of a command, of instruction sets, and of CPU time for reading a request.

Number and waiting policy of threads are read from environment variables when torch is imported, so that a command can
choose them and a library must not. `EngineConfig.num_threads` changes the number later.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar

from kvmosaic.errors import InvalidConfig, TooMuchWork

T = TypeVar("T")
MAX_QUOTA_FILE_BYTES = 65_536
_MAX_CORES = 65_536.0
_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")
"""Version 2, where "max" is no limit; and version 1, where a number of 19 digits is none."""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Seconds of CPU time that this process may use per second, by the tightest of the groups around it.

    A limit such as `--cpus 2` takes no core away: programs see all cores of the host, and when the time of a tenth of a
    second is used up, all of their threads are paused until the next one.

    Args:
        root: where `proc` and `sys` are.

    Returns:
        For example 2.0 or 0.5; None if there is no limit, or none can be read.
    """
    return min((quota for folder in _folders(root, "cpu") if (quota := _quota(folder)) is not None), default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process may use, by the tightest of the groups around it; None without a limit."""
    limits = (_read(folder / name).strip() for folder in _folders(root, "memory") for name in _MEMORY_FILES)
    return min((int(limit) for limit in limits if _is_count(limit, digits=18)), default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process can still have without swapping; None where the system does not say.

    What the machine has available, or what the container's limit leaves of it beside this process.
    """
    available = _kib(_read(root / "proc" / "meminfo"), "MemAvailable")
    limit, used = memory_limit(root), _kib(_read(root / "proc" / "self" / "status"), "VmRSS")
    left = [max(limit - used, 0)] if limit is not None and used is not None else []
    return min([*left, *([available] if available is not None else [])], default=None)


MAX_BLOCKS = 1 << 24
"""Maximum blocks of one pool: their bookkeeping takes 335 MB before anything is cached. Measured up to ten million."""


def blocks_within(num_bytes: int, bytes_per_block: int, purpose: str) -> int:
    """Number of blocks that fit into a budget.

    Raises:
        InvalidConfig: not even one block fits, or more than `MAX_BLOCKS`.
    """
    count = num_bytes // max(bytes_per_block, 1)
    if count < 1:
        raise InvalidConfig(
            f"{purpose} is {num_bytes} bytes, but one block of this model takes {bytes_per_block} bytes; "
            f"give it at least {bytes_per_block} bytes or use a smaller block_size"
        )
    if count > MAX_BLOCKS:
        raise InvalidConfig(
            f"{purpose} is {num_bytes} bytes, which is {count} blocks of {bytes_per_block} bytes, and a pool has "
            f"{MAX_BLOCKS} at most; give it at most {MAX_BLOCKS * bytes_per_block} bytes or use a larger block_size"
        )
    return count


def _kib(text: str, name: str) -> int | None:
    """Bytes in a line such as `MemAvailable:   16000000 kB`."""
    found = re.search(rf"^{name}:\s+([0-9]{{1,15}}) kB$", text, re.MULTILINE)
    return int(found[1]) * 1_024 if found else None


def _folders(root: Path, controller: str) -> Iterator[Path]:
    groups = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        yield from _folders_of(groups, line, controller)


def _folders_of(groups: Path, line: str, controller: str) -> Iterator[Path]:
    """The folders of a group and of all groups around it: `4:cpu,cpuacct:/pod/container` or `0::/user`.

    Inside a container the path may be that of the host and not be there, but its beginning, the mounted group, is.
    """
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if number == "0" and not controllers:
        tops = [groups, groups / "unified"]
    elif controller in controllers.split(","):
        tops = [groups / controllers, groups / controller]
    else:
        return
    inner = PurePosixPath(path.lstrip("/"))
    if ".." not in inner.parts:
        yield from (top / part for top in tops for part in (inner, *inner.parents))


def _quota(folder: Path) -> float | None:
    """Version 2: `200000 100000` or `max 100000` in one file; version 1: two files, and -1 for no limit."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(_is_count(word, digits=15) for word in words):
        return None
    quota, period = (int(word) for word in words)
    return min(quota / period, _MAX_CORES) if quota and period else None


def _is_count(word: str, *, digits: int) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= digits


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(MAX_QUOTA_FILE_BYTES)
    except OSError:
        return ""


SPINS = 3_000
"""Number of times a waiting thread polls for work before it sleeps: microseconds. libgomp's default is 300,000."""
FREE_SHARE = 0.75
"""Minimum share of free cores, of the cores for threads, at which spinning pays."""
_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine a command starts on."""

    cores: int
    """Cores on which this process may run."""
    all_cores: int
    """Cores of the whole machine."""
    quota: float | None = None
    """Seconds of CPU time per second that its container allows; None: no limit."""
    load: float | None = None
    """Processes of the whole machine that ran or wanted to, on average over the last minute; None: not known."""

    @property
    def threads(self) -> int:
        """As many as can run at once. Part of a core counts as one, as most programs in containers count it."""
        return self.cores if self.quota is None else max(1, min(self.cores, math.ceil(self.quota)))


def this_machine() -> Machine:
    """The machine, its container and its load at this moment."""
    all_cores = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_cores
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none
        load = None
    return Machine(cores, max(cores, all_cores), cpu_quota(), load)


def compute_threads(machine: Machine, root: Path = Path("/")) -> int:
    """As many threads as compute at once: one for each core, although some cores run two."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(machine.cores)
    siblings = {_read(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores}
    return min(machine.threads, len(siblings)) if siblings and "" not in siblings else machine.threads


def thread_variables(environment: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """Environment variables to be set before torch is imported; none that the user has set, or that repeats a default.

    - Where a container allows less than its cores: the number of threads.
    - On a machine that is idle enough: waiting threads poll for work a few thousand times, then sleep.
      Otherwise they sleep at once, and leave the core to others.
    """
    wanted = {}
    if machine.threads < machine.cores and not any(name in environment for name in _NUMBERS):
        wanted["OMP_NUM_THREADS"] = str(machine.threads)
    if not any(name in environment for name in _WAITS):
        is_idle = machine.load is not None and machine.all_cores - machine.load >= FREE_SHARE * machine.threads
        wanted |= {"GOMP_SPINCOUNT": str(SPINS)} if is_idle else {"OMP_WAIT_POLICY": "PASSIVE"}
    return wanted


ISA_VARIABLE = "KVMOSAIC_CPU_ISA"
"""Environment variable with the best instruction set that may be used, as ONEDNN_MAX_CPU_ISA is for oneDNN."""

InstructionSet = Literal["portable", "avx2", "avx512"]
INSTRUCTION_SETS: tuple[InstructionSet, ...] = ("portable", "avx2", "avx512")
"""The worst one first. portable: what a compiler makes of plain C; avx512 includes AVX512-BF16."""


def allowed_instruction_sets(environment: Mapping[str, str] = os.environ) -> tuple[InstructionSet, ...]:
    """Returns the instruction sets that the environment allows, worst first; the CPU may lack some of them.

    Raises:
        InvalidConfig: the variable has an unknown value.
    """
    limit = environment.get(ISA_VARIABLE, "").strip().lower() or "auto"
    for count, name in enumerate(INSTRUCTION_SETS, start=1):
        if limit == name:
            return INSTRUCTION_SETS[:count]
    if limit != "auto":
        raise InvalidConfig(
            f"{ISA_VARIABLE} is {environment[ISA_VARIABLE]!r:.100}; choose {', '.join(INSTRUCTION_SETS)}, or auto for "
            "the best that this CPU has"
        )
    return INSTRUCTION_SETS


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this x86 CPU; none where they are not known, as on other systems and processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


_of_thread = threading.local()
_WATCH_SECONDS = 1.0
_CAN_WATCH = hasattr(time, "pthread_getcpuclockid")


class _Watch:
    """Ends code that runs past its limit and never calls `check_cpu`, such as a chat template that loops for ever.

    While there are limits, a thread looks every second for one that is exceeded by far.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: dict[int, float] = {}
        """Of threads, by their number: the CPU time at which they end."""
        self._raised: set[int] = set()
        """Those of them in which an exception was raised."""
        self._is_watching = False

    def begin(self, end: float) -> None:
        """Watches the calling thread until `end`."""
        with self._lock:
            self._limits[threading.get_ident()] = end
            if not self._is_watching:
                threading.Thread(target=self._watch, name="kvmosaic-cpu-limit", daemon=True).start()
                self._is_watching = True

    def end(self) -> None:
        """Ends what `begin` began; an exception that has not been raised yet never is."""
        thread = threading.get_ident()
        with self._lock:
            self._limits.pop(thread, None)
            is_raised = thread in self._raised
            self._raised.discard(thread)
        if is_raised:
            with suppress(_TakenBack):
                _raise_in(thread, _TakenBack)
                while True:  # until it is raised, at this jump at the latest
                    pass

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            with self._lock:
                for thread, end in list(self._limits.items()):
                    if _cpu_seconds_of(thread) > end + _WATCH_SECONDS:
                        self._raised.add(thread)
                        _raise_in(
                            thread, TooMuchWork
                        )  # again and again: Python drops what ends a weak reference's callback
                if not self._limits:
                    self._is_watching = False
                    return


def _cpu_seconds_of(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


class _TakenBack(BaseException):
    """Takes the place of an exception that may not have been raised yet.

    Without one, Python up to 3.12 would go on looking for it at every jump, and hang under a debugger.
    """


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raises in a thread, at its next call or jump of Python, in place of what was to be raised there."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


_watch = _Watch()


def limited_call(seconds: float, function: Callable[[], T]) -> T:
    """Calls a function in which `check_cpu` raises once this thread has used this much CPU time in it.

    Python code that never calls it is ended a second or two later, where the system tells the time of another thread.

    Raises:
        TooMuchWork: it has exceeded the limit. And whatever the function raises.
    """
    _of_thread.limit = limit = (time.thread_time() + seconds, seconds)
    try:
        if _CAN_WATCH:
            _watch.begin(limit[0])
        return function()
    except TooMuchWork as error:
        raise error if error.args else _too_much(seconds) from None
    finally:
        while _of_thread.limit is not None:
            try:  # the exception of the watch may come as late as here, once
                if _CAN_WATCH:
                    _watch.end()
                _of_thread.limit = None
            except TooMuchWork:
                continue


def check_cpu() -> None:
    """Raises if the limit is exceeded; call it every few hundredths of a second. Does nothing without a limit.

    Raises:
        TooMuchWork: this thread has exceeded its limit.
    """
    limit = getattr(_of_thread, "limit", None)
    if limit is not None and time.thread_time() > limit[0]:
        raise _too_much(limit[1])


def _too_much(seconds: float) -> TooMuchWork:
    return TooMuchWork(f"reading this took more than {seconds:g} s of processor time; send less at once")
