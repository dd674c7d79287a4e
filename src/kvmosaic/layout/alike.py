"""Documents that are alike: a model mixes them up if each of them was computed as the first one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvmosaic.prompt import Segment

_MIN_SHARE, _MIN_TOKENS, _MAX_TOKENS = 0.6, 8, 256
"""Share of the tokens that both have; least tokens of a document; first tokens that are compared."""


def are_alike(chunks: Sequence[Segment]) -> bool:
    """Whether two neighbours have most of their tokens in common.

    Records of one kind have 59% to 98% in six languages (`kvmosaic eval --tasks similar`), paragraphs of one article
    9% to 52% (XQuAD).
    """
    known = [frozenset((chunk.token_ids or ())[:_MAX_TOKENS]) for chunk in chunks]
    return any(
        one != other and len(one & other) >= _MIN_SHARE * max(min(len(one), len(other)), _MIN_TOKENS)
        for one, other in pairwise(known)
    )
