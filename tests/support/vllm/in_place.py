"""What tests look at inside an engine that reads documents in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from kvmosaic.vllm.worker.in_place.reader import MaskReads
from kvmosaic.vllm.worker.in_place.trial import check_reading
from support.vllm import faults
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
            engine.last_starts = [[read.start for read in request.reads] for request in done.in_place]
        return done

    side.operations = watched


def reads(engine: Any) -> list[list[int]]:
    """Tokens of the documents that each request of the last step read in place; forgotten by this."""
    found, engine.last_reads = engine.last_reads, []
    return list(found)


def starts(engine: Any) -> list[list[int]]:
    """In which slot of its first block each of them begins."""
    return list(engine.last_starts)


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


def found_by_check(engine: Any, fault: str) -> str:
    """Inside: what the check of reading says with a fault in the second layer; "": without any."""
    places, nested = faults.places_of(engine)
    reader = places.layers[0].layer.impl.reader
    planted = {
        "": nullcontext,
        "turned_the_other_way": _turned_the_other_way,
        "values_smaller": lambda: faults.stored_values_smaller(places, 1),
        "sharper": _sharper,
        "window": lambda: faults.window(places, 1),
    }
    with planted[fault]():
        return check_reading(places, reader, nested)


@contextmanager
def _sharper() -> Iterator[None]:
    original = MaskReads.attend
    with patch.object(MaskReads, "attend", lambda self, place, query, *rest: original(self, place, query * 1.1, *rest)):
        yield


@contextmanager
def _turned_the_other_way() -> Iterator[None]:
    original = MaskReads._positions
    with patch.object(MaskReads, "_positions", lambda self: original(self)[::-1]):
        yield
