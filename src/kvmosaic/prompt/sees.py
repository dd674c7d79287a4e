"""Visibility between chunks: the earlier chunks that a chunk sees, as indexes."""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.errors import InvalidSees
from kvmosaic.prompt.segment import Segment


def seen_chunks(chunks: Sequence[Segment]) -> tuple[tuple[int, ...], ...]:
    """For every chunk of a prompt, the indexes of the chunks in its `sees`, in order.

    A name refers to the last chunk of that name before the chunk that sees it.

    Raises:
        InvalidSees: a chunk sees itself, a later chunk, one that does not exist, or one twice.
    """
    numbers: dict[str, int] = {}
    seen = []
    for index, chunk in enumerate(chunks):
        seen.append(tuple(sorted(_number(chunk, index, entry, numbers) for entry in chunk.sees)))
        if len(set(seen[-1])) != len(chunk.sees):
            raise InvalidSees(f"{chunk.label} names a chunk twice in sees={chunk.sees}; name each once")
        if chunk.name is not None:
            numbers[chunk.name] = index
    return tuple(seen)


def _number(chunk: Segment, index: int, entry: int | str, numbers: dict[str, int]) -> int:
    if isinstance(entry, str):
        if entry not in numbers:
            before = ", ".join(repr(name) for name in list(numbers)[:10]) or "none has a name"
            raise InvalidSees(
                f"{chunk.label} lists {entry!r} in `sees`, and no chunk before it has that name; before it: {before}"
            )
        return numbers[entry]
    if not index:
        raise InvalidSees(f"{chunk.label} is the first chunk and cannot see chunk {entry!r}; remove it from sees")
    if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry < index:
        raise InvalidSees(
            f"{chunk.label} is chunk {index} and its `sees` lists chunk {entry!r}; "
            f"a chunk sees only chunks before it (0 to {index - 1}, or their names)"
        )
    return entry
