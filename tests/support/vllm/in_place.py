"""What tests look at inside an engine that reads documents in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.vllm.asking import Ask
from support.vllm.inside import prompt_and_params


def watch_reads(engine: Any) -> None:
    """From now on, `reads` knows what was read."""
    side = engine.scheduler.connector._composer
    if hasattr(engine, "last_reads"):
        return
    engine.last_reads, operations = [], side.operations

    def watched(scheduled: Any) -> Any:
        done = operations(scheduled)
        if done.in_place:
            engine.last_reads = [[read.num_tokens for read in request.reads] for request in done.in_place]
        return done

    side.operations = watched


def reads(engine: Any) -> list[list[int]]:
    """Tokens of the documents that each request of the last step read in place; forgotten by this."""
    found, engine.last_reads = engine.last_reads, []
    return list(found)


def held_by(engine: Any, asks: Sequence[Ask]) -> int:
    """The most blocks that requests reference at once."""
    return int(engine.call(most_held, asks=[ask.to_json() for ask in asks]))


def most_held(engine: Any, asks: list[dict[str, Any]]) -> int:
    """Inside: see `held_by`."""
    for number, ask in enumerate(asks):
        engine.engine.add_request(f"held-{number}", *prompt_and_params(ask))
    most = 0
    while engine.engine.has_unfinished_requests():
        engine.engine.step()
        most = max(most, sum(bool(block.ref_cnt) for block in engine.pool.blocks if not block.is_null))
    return most
