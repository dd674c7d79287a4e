"""Order of documents: which of them are read first, where a request leaves that to the cache.

A document's first copy saw the system text only, later copies saw companions, too. So a known document is computed
again where it comes first for the first time; another one that has come first before is there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, product

from kvmosaic.cache.kv_cache import KVCache
from kvmosaic.layout import Layout, arrange
from kvmosaic.prompt import Prompt, Segment, SegmentKind

CHOSEN_ORDER = "the cache chose the order of documents"


def in_best_order(prompt: Prompt, layout: Layout, kv_cache: KVCache, *, moves_sections: bool = True) -> Prompt:
    """A prompt in the order that computes the fewest tokens; of several such orders, the one nearest to its own.

    The prompt itself, if its order does not matter, if there are texts between its documents, or if one sees another.

    Args:
        prompt: a prompt with token ids.
        layout: of this prompt.
        kv_cache: where its documents are looked up.
        moves_sections: as for the layout.
    """
    documents = _documents(prompt)
    companions = layout.companions[: len(documents) - 1] if documents else []
    if not companions:
        return prompt
    missing = []
    for place in range(len(companions) + 1):
        after = replace(prompt.without_texts(), companions=tuple(companions[:place]), place=place)
        placed = arrange(after, layout.strategy, layout.chunk_context, moves_sections=moves_sections)
        placed = replace(placed, spans=placed.spans[:-1], adapter=layout.adapter)
        plan = kv_cache.plan(placed, prompt.salt, prompt.tenant)
        computed = (span.num_to_compute for span in plan.spans if span.is_chunk)
        missing.append([sum(islice(computed, len(chunks))) for chunks in documents])
    chosen = first_documents(missing)
    rest = (number for number in range(len(documents)) if number not in chosen)
    inner = [chunk for number in (*chosen, *rest) for chunk in documents[number]]
    before = prompt.segments.index(documents[0][0])
    return replace(prompt, segments=(*prompt.segments[:before], *inner, *prompt.segments[before + len(inner) :]))


def first_documents(missing: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Which documents come first, so that the fewest tokens are computed.

    Args:
        missing: [p][d]: tokens that document d computes after p others; the last row: after so many or more.
    """
    *places, later = missing
    gains = [[after - here for here, after in zip(row, later, strict=True)] for row in places]
    best = [sorted(range(len(later)), key=row.__getitem__, reverse=True)[: len(places)] for row in gains]
    return max(
        (numbers for numbers in product(*best) if len(set(numbers)) == len(numbers)),
        key=lambda numbers: (
            sum(row[number] for row, number in zip(gains, numbers, strict=True)),
            [-number for number in numbers],
        ),
    )


def _documents(prompt: Prompt) -> list[list[Segment]]:
    """The chunks of each document; none, if their order cannot be changed."""
    kinds = [segment.kind for segment in prompt.segments]
    chunks = prompt.chunks
    first = kinds.index(SegmentKind.CHUNK) if chunks else 0
    is_together = prompt.segments[first : first + len(chunks)] == chunks
    if not is_together or any(chunk.sees or chunk.origin for chunk in chunks):
        return []
    documents: list[list[Segment]] = []
    for chunk in chunks:
        if chunk.continues and documents:
            documents[-1].append(chunk)
        else:
            documents.append([chunk])
    return documents
