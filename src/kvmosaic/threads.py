"""Thread settings of the command: number of compute threads within the container's CPU quota, and their waiting policy.

Both are read from environment variables when torch is imported, so that a command can choose them and a library must
not. `EngineConfig.num_threads` changes the number later.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvmosaic.container import cpu_quota

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
