"""Ways of answering: every combination that makes sense, each once."""

from __future__ import annotations

import pytest

from kvmosaic.errors import InvalidConfig, InvalidRepair
from kvmosaic.lab.eval.cases import gather, parts_of
from kvmosaic.lab.eval.variants import FULL, Variant, variants


def test_full_attention_is_there_once_and_first() -> None:
    for repairs in (["none"], ["none", "full"], ["full"], ["full", "full", "none"]):
        found = variants(repairs)
        assert found[0] == FULL
        assert sum(way.repair == "full" for way in found) == 1


def test_every_policy_meets_every_strategy_and_context() -> None:
    found = variants(["none", "query(0.150)", "first( 8 )", "query(.15)"])
    assert len(found) == 1 + 2 * 3 * 3
    assert Variant("shared", "none", "query(0.15)") in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("repairs", "strategies", "contexts", "said"),
    [
        (["none"], ["absolute"], ["system"], "the strategy 'absolute' is none of sequential, shared"),
        (["none"], ["shared"], ["all"], "the context 'all' is none of system, companions, none"),
        ([], ["shared"], ["system"], "give at least one policy"),
        (["none"], [], ["system"], "give at least one policy"),
        (["none"] * 101, ["shared"], ["system"], "101 policies are too many"),
    ],
)
def test_impossible_combinations_are_told(
    repairs: list[str], strategies: list[str], contexts: list[str], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        variants(repairs, strategies, contexts)
    with pytest.raises(InvalidRepair, match="choose one of none, first"):
        variants(["all"])


def test_commas_part_a_list() -> None:
    assert parts_of("--repair", "none, first(8),full") == ("none", "first(8)", "full")
    with pytest.raises(InvalidConfig, match="--repair is 'none,,full', and a part of it is empty"):
        parts_of("--repair", "none,,full")
    with pytest.raises(InvalidConfig, match="at most 10000 are allowed"):
        parts_of("--tasks", "x" * 10_001)


def test_cases_come_in_turns_so_that_an_early_end_has_seen_every_task() -> None:
    cases = gather(["one-hop", "two-hop", "one-hop"], count=3)
    assert [case.task for case in cases] == ["one-hop", "two-hop"] * 3
    assert len(gather(["story"])) == 16
    with pytest.raises(InvalidConfig, match="65 tasks and 0 files are too many"):
        gather(["story"] * 65)
