"""A fake engine for tests: it computes nothing, and its times are given."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvmosaic.lab.bench.peers import BatchTimes, RequestTimes
from kvmosaic.prompt import Prompt


class FakePeer:
    """Answers at once; says that a prompt of n tokens took n milliseconds, and each later token one."""

    def __init__(self, name: str, *, is_ours: bool = False, speed: float = 1.0, calls: list[str] | None = None) -> None:
        self.name, self.dtype, self.is_ours = name, "float32", is_ours
        self.process_id = os.getpid()
        self.speed = speed
        self.calls = [] if calls is None else calls

    def reset(self) -> None:
        self.calls.append(f"{self.name} resets")

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> BatchTimes:
        self.calls.append(f"{self.name} answers {len(prompts)}")
        readings = [
            RequestTimes(
                first_seconds=prompt.num_tokens / 1e3 / self.speed,
                token_seconds=1e-3 / self.speed if num_answer > 1 else None,
                num_prompt=prompt.num_tokens,
                num_answer=num_answer,
                num_computed=prompt.num_tokens,
            )
            for prompt in prompts
        ]
        return BatchTimes(sum(reading.first_seconds for reading in readings), tuple(readings), 1_000 * len(prompts))

    def close(self) -> None:
        pass
