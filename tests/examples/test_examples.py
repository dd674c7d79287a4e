from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("vllm_"))
"""Those with vLLM have tests of their own."""


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_prints_something(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path))
    assert capsys.readouterr().out.strip()


def test_documents_in_another_order_give_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = runpy.run_path(str(FOLDER / "handles.py"))["answers"]
    assert first == second != ""
    assert "+" in capsys.readouterr().out, "a plan shows a moved document"


def test_engine_of_the_parts_computes_what_a_dense_forward_does(capsys: pytest.CaptureFixture[str]) -> None:
    matches = runpy.run_path(str(FOLDER / "block_manager.py"))["matches"]
    assert len(matches) == 24 and all(matches)
    said = capsys.readouterr().out
    assert "11 tokens: 8 reused, 3 to compute" in said and "is shared: copied to block" in said
