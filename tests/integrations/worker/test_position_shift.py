"""Positions lowered for tokens of some blocks, and nothing else changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kvmosaic.vllm.operations import ShiftedTokens
from kvmosaic.vllm.worker import position_shift
from kvmosaic.vllm.worker.position_shift import PositionShift, StepPositions, can_shift

BLOCK = 4

GROUP = SimpleNamespace(kv_cache_spec=None)


class Model(nn.Module):
    """Says which positions it was given."""

    def forward(self, input_ids, positions, inputs_embeds=None):
        if input_ids is None:
            raise RuntimeError("no tokens")
        return positions.clone()


@pytest.fixture
def slots(monkeypatch):
    """`slots([...])`: where the tokens of the next forward are written."""

    def given(numbers):
        monkeypatch.setattr(position_shift, "step_slots", lambda: None if numbers is None else torch.tensor(numbers))

    return given


@given(data=st.data())
def test_each_token_is_lowered_by_what_its_block_says(data):
    block_of = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    distances = data.draw(st.dictionaries(st.integers(0, 9), st.integers(0, 30), max_size=5))
    slots = [block * BLOCK + i % BLOCK for i, block in enumerate(block_of)]
    slots += [-1] * data.draw(st.integers(0, 3))
    num_positions = len(slots) + data.draw(st.integers(0, 2))
    given = torch.arange(10, 10 + num_positions)
    wanted = given.clone()
    for i, slot in enumerate(slots):
        if slot >= 0:
            wanted[i] = max(0, int(given[i]) - distances.get(slot // BLOCK, 0))
    model = Model()
    shift = PositionShift(model, BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(position_shift, "step_slots", lambda: torch.tensor(slots, dtype=torch.int64))
        shift.begin([ShiftedTokens((block,), distance) for block, distance in distances.items()])
        kept = given.clone()
        seen = model(input_ids=torch.zeros(num_positions), positions=given)
        assert torch.equal(seen, wanted)
        assert torch.equal(given, kept)  # the runner's own tensor
        shift.end()
        assert torch.equal(model(input_ids=torch.zeros(num_positions), positions=given), given)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_two_that_change_the_same_tensor_restore_what_was_given_in_the_end(slots):
    model, given = Model(), torch.tensor([5, 6, 7])
    first, second = StepPositions(model), StepPositions(model)
    slots([0, 1, 2])
    first.begin(lambda positions, _: positions - 2)
    second.begin(lambda positions, _: positions * 2)
    assert model(torch.zeros(3), given).tolist() == [6, 8, 10]
    assert given.tolist() == [5, 6, 7]


def test_several_positions_per_token_are_all_lowered(slots):
    model = Model()
    shift = PositionShift(model, BLOCK)
    slots([8, 9, 12])
    shift.begin([ShiftedTokens((2,), 5)])
    given = torch.tensor([[7, 8, 9]] * 3)
    assert model(torch.zeros(3), given).tolist() == [[2, 3, 9]] * 3


def test_a_step_without_shifts_hooks_nothing(slots):
    model = Model()
    shift = PositionShift(model, BLOCK)
    shift.begin([ShiftedTokens((1, 2), 3)])
    shift.begin([ShiftedTokens((1, 2), 0)])
    assert not model._forward_pre_hooks
    shift.begin([ShiftedTokens((0,), 1)])
    slots(None)  # a forward that writes nowhere
    assert model(torch.zeros(2), torch.tensor([5, 6])).tolist() == [5, 6]
    shift.end()
    shift.end()


def test_positions_changed_in_place_come_back_when_the_forward_fails(slots):
    model = Model()
    shift = PositionShift(model, BLOCK)
    shift.begin([ShiftedTokens((0,), 2)])
    slots([0, 1])
    given = torch.tensor([5, 6])
    with pytest.raises(RuntimeError, match="no tokens"):
        model(input_ids=None, positions=given)
    assert given.tolist() == [5, 6]


def configuration(**fields):
    graphs = fields.pop("graphs", None)
    mode = graphs and SimpleNamespace(has_full_cudagraphs=lambda: graphs == "full")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**fields.pop("parallel", {})),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        speculative_config=fields.pop("speculative", None),
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"graphs": "pieces"}, ""),
        ({"graphs": "full"}, "PIECEWISE"),
        ({"parallel": {"use_ubatching": True}}, "--enable-dbo"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode context parallel"),
        ({"speculative": object()}, "speculative"),
    ],
)
def test_where_positions_cannot_be_shifted_it_says_why(fields, reason):
    said = can_shift(configuration(**fields), SimpleNamespace(kv_cache_groups=[GROUP]), Model())
    assert reason in said and bool(reason) == bool(said)


def test_a_compiled_root_module_has_no_hooks():
    class Compiled(Model):
        def __call__(self, *arguments, **named):
            return self.forward(*arguments, **named)

    assert "no forward hooks" in can_shift(configuration(), SimpleNamespace(kv_cache_groups=[GROUP]), Compiled())
    assert "2 groups" in can_shift(configuration(), SimpleNamespace(kv_cache_groups=[GROUP, GROUP]), Model())
