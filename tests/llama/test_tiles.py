"""Padded forwards: as right as others, and only where they are shorter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from llama.test_conformance import reader
from support.engine_conformance import CASES, Reference, each_case, run_case
from support.llama_engine import llama_engine, llama_reader

from kvmosaic.llama import runner
from kvmosaic.llama.views import TILE, Part, RowCost, is_shorter_apart, num_padding, row_cost

SMOLLM2 = row_cost(135_000_000, "Q4_1", 2 * 30 * 9 * 64)
SMOLLM2_Q8 = row_cost(135_000_000, "Q8_0", 2 * 30 * 9 * 64)
LLAMA_8B = row_cost(8_000_000_000, "Q4_K - Medium", 2 * 32 * 32 * 128)


def always(groups: Sequence[tuple[int, int]], cost: RowCost) -> int:
    return max(0, TILE - sum(count for count, _ in groups))


@pytest.mark.parametrize(("case", "way"), each_case(["as they are", "padded", "apart"])[len(CASES) :])
def test_padded_forwards_and_forwards_for_each_rows_give_the_same(
    case: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "padded":
        monkeypatch.setattr(runner, "num_padding", always)
    else:
        monkeypatch.setattr(runner, "is_shorter_apart", lambda *_: True)
    run_case(case, llama_engine(llama_reader()), Reference(reader(), 0.05))


def part(num_rows: int, **reads: int) -> Part:
    return Part(num_rows, reads)


def test_prompts_have_forwards_of_their_own_and_answers_share_one() -> None:
    assert is_shorter_apart(part(1024), part(1024), SMOLLM2_Q8)
    assert is_shorter_apart(part(1024), part(1, own=1024), SMOLLM2_Q8)
    assert not is_shorter_apart(part(1, a=1024), part(1, b=1024), SMOLLM2_Q8)
    assert not is_shorter_apart(part(7, a=7168), part(1, b=1024), SMOLLM2_Q8)


def test_questions_about_the_same_documents_share_a_forward() -> None:
    assert not is_shorter_apart(part(60, document=2400), part(60, document=2400), SMOLLM2_Q8)
    assert not is_shorter_apart(part(60, document=2400, own=100), part(60, document=2400, other=90), LLAMA_8B)


def test_a_forward_is_padded_where_that_is_shorter() -> None:
    assert num_padding([(63, 2560)], SMOLLM2) == 1 and num_padding([(40, 2000), (8, 2560)], SMOLLM2) == 16
    assert num_padding([(1, 100_000)], SMOLLM2) == num_padding([(8, 2560)], SMOLLM2) == 0
    assert num_padding([(63, 10)], SMOLLM2) == num_padding([(32, 2560)], LLAMA_8B) == 0
    assert num_padding([(29, 2400)], SMOLLM2) == 0 and num_padding([(30, 2400)], SMOLLM2) == TILE - 30
    assert num_padding([(27, 2400)], SMOLLM2_Q8) == TILE - 27 and num_padding([(26, 2400)], SMOLLM2_Q8) == 0
    assert num_padding([(32, 600)], SMOLLM2_Q8) == 0
    assert num_padding([(TILE, 2560)], SMOLLM2) == num_padding([], SMOLLM2) == 0
