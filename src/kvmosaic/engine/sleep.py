"""Sleep: an idle engine gives its device memory back, and takes it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.cache import KVCache
from kvmosaic.errors import EngineAsleep, InvalidConfig

if TYPE_CHECKING:
    from kvmosaic.engine.chunk_offloader import ChunkOffloader
    from kvmosaic.engine.model_runner import StepRunner


class SleepState:
    """Whether an engine is awake, asleep, or waits for its running requests to finish before it sleeps.

    awake ──begin──▶ falling asleep ──running requests have finished: fall_asleep──▶ asleep ──wake──▶ awake
    """

    def __init__(self, runner: StepRunner, kv_cache: KVCache, offloader: ChunkOffloader | None) -> None:
        self.level = 0
        """1 or 2 while it sleeps, or is about to; 0 otherwise."""
        self.refuses = False
        """Whether requests are refused meanwhile; otherwise they wait."""
        self._runner = runner
        self._kv_cache = kv_cache
        self._offloader = offloader

    @property
    def is_asleep(self) -> bool:
        """Whether the pools hold no device memory."""
        return self._runner.is_asleep

    @property
    def is_falling_asleep(self) -> bool:
        """Whether it sleeps as soon as no request runs."""
        return self.level > 0 and not self.is_asleep

    def check_admits(self) -> None:
        """Raises EngineAsleep if requests are refused."""
        if self.level and self.refuses:
            raise EngineAsleep(f"the engine sleeps (level {self.level}) and takes no requests; wake it first")

    def begin(self, level: int, *, refuse: bool) -> None:
        """Prepares to sleep; while asleep or falling asleep, the level stays, and only `refuse` changes.

        Raises:
            InvalidConfig: a level other than 1 and 2.
        """
        if level not in (1, 2):
            raise InvalidConfig(f"a sleep has level 1 (keep caches in host memory) or 2 (drop them), got {level!r}")
        self.level = self.level or level
        self.refuses = refuse

    def fall_asleep(self) -> None:
        """Releases the device memory; what the level keeps is copied to host memory."""
        if self._offloader is not None:
            self._offloader.flush()
        if self.level == 2:
            self._kv_cache.reset()
        self._runner.sleep(*self._kv_cache.used_blocks())

    def wake(self) -> None:
        """Reallocates the memory; does nothing while awake."""
        self._runner.wake()
        self.level, self.refuses = 0, False
