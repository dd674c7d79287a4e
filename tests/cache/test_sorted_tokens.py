"""Siblings against the obvious: look at all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.cache import KeyChain
from kvmosaic.cache import prefix_entry as module
from kvmosaic.cache.block_pool import BlockId
from kvmosaic.cache.keys import Key, encode_tokens
from kvmosaic.cache.prefix_entry import PrefixEntry, SortedByTokens, num_alike

ROOT = KeyChain("model").root(0)
tokens = st.lists(st.sampled_from([0, 1, 2, 255, 256, 65_536, 2**32 - 1]), min_size=1, max_size=6).map(tuple)


def entry_of(token_ids):
    return PrefixEntry(Key(b""), ROOT, None, encode_tokens(token_ids), BlockId(0))


def counted(one, other):
    """The twin of `num_alike`."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            return count
        count += 1
    return count


@given(tokens, tokens)
def test_alike_tokens_are_counted_from_the_beginning(one, other):
    assert num_alike(encode_tokens(one), encode_tokens(other)) == counted(one, other)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(tokens, st.booleans()), max_size=60), st.lists(tokens, min_size=1, max_size=10))
def test_one_of_the_neighbours_begins_most_like_any_tokens(changes, asked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MAX_IN_A_BUCKET", 3)
        first = entry_of((7,))
        children, known = SortedByTokens(first), {(7,): first}
        for token_ids, is_added in changes:
            if is_added and token_ids not in known:
                known[token_ids] = entry_of(token_ids)
                children.add(known[token_ids])
            elif not is_added and token_ids in known:
                children.discard(known.pop(token_ids))
                children.discard(first if token_ids == (7,) else entry_of(token_ids))
        children.check_invariants()
    assert len(children) == len(known) and bool(children) == bool(known) and set(children) == set(known.values())
    for token_ids in asked:
        encoded = encode_tokens(token_ids)
        before, behind = children.neighbours(encoded)
        assert [*[*children.before(encoded)][::-1], *children.behind(encoded)] == list(children)
        assert before is None or before.tokens < encoded
        assert behind is None or behind.tokens >= encoded
        best = max((counted(token_ids, other) for other in known), default=0)
        found = (num_alike(one.tokens, encoded) for one in (before, behind) if one is not None)
        assert max(found, default=0) == best
