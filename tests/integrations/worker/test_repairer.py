"""Repairs in as few forwards as may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.vllm.operations import RepairedRun
from kvmosaic.vllm.worker.extra_forward import Repairer, forwards


def run(start: int, num_tokens: int, *, request: int = 0, shift: int = 0) -> RepairedRun:
    """A run whose token ids tell their index."""
    return RepairedRun((request,), start, tuple(range(start, start + num_tokens)), start - shift)


@st.composite
def repairs(draw: st.DrawFn) -> list[RepairedRun]:
    """Runs of a few requests, those of one request apart from each other."""
    found = []
    for request in range(draw(st.integers(1, 3))):
        cursor, shift = 0, draw(st.integers(0, 3))
        for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=5)):
            start = cursor + gap
            found.append(run(start, length, request=request, shift=min(shift, start)))
            cursor = start + length
    return draw(st.permutations(found))


@given(repairs(), st.integers(1, 20), st.integers(1, 4))
def test_every_token_is_computed_once_and_after_those_it_sees(wanted, max_tokens, max_runs):
    made = list(forwards(wanted, max_tokens, max_runs))
    assert all(1 <= len(runs) <= max_runs and sum(len(r.token_ids) for r in runs) <= max_tokens for runs in made)
    order = {}
    for number, runs in enumerate(made):
        for each in runs:
            assert each.token_ids
            for i, token in enumerate(each.token_ids):
                assert token == each.start + i
                assert (each.blocks, token) not in order
                order[each.blocks, token] = (number, each.position + i)
    positions = {(r.blocks, t): r.position + i for r in wanted for i, t in enumerate(r.token_ids)}
    assert {key: position for key, (_, position) in order.items()} == positions
    for (blocks, token), (number, _) in order.items():
        assert all(
            number >= before for (owner, index), (before, _) in order.items() if owner == blocks and index < token
        )


def test_a_run_that_does_not_fit_is_cut():
    made = list(forwards([run(10, 5), run(0, 4), run(20, 1)], max_tokens=6, max_runs=8))
    assert [[(r.start, len(r.token_ids), r.position) for r in runs] for runs in made] == [
        [(0, 4, 0), (10, 2, 10)],
        [(12, 3, 12), (20, 1, 20)],
    ]


@pytest.mark.parametrize(("max_runs", "num_forwards"), [(8, 1), (2, 2)])
def test_a_repairer_runs_all_of_them(max_runs, num_forwards):
    class Recorded:
        def __init__(self) -> None:
            self.max_tokens, self.max_runs, self.seen = 100, max_runs, []

        def forward(self, runs, *, compiled=True):
            assert len(runs) <= self.max_runs and compiled
            self.seen.extend(runs)

    nested = Recorded()
    wanted = [run(0, 3), run(5, 2), run(9, 1)]
    assert Repairer(nested).run(wanted) == num_forwards
    assert nested.seen == wanted
    assert Repairer(nested).run([]) == 0
