"""Engines beside ours, in processes that speak lines of JSON: `benchmarks/engines.py`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.assembly import bundled_reader
from kvmosaic.errors import EngineError
from kvmosaic.lab.bench.models import Subject
from kvmosaic.lab.bench.peers import PeerOptions, open_peers
from kvmosaic.model import load_model
from kvmosaic.prompt import Prompt

FAKE_WORKER = """
import json, sys
print(json.dumps({"version": "1.2.3"}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    print("a library prints something", flush=True)
    readings = [{"first": 0.25, "last": 0.75, "reused": 1} for _ in message.get("prompts", ())]
    print(json.dumps({} if "reset" in message else {"seconds": 1.0, "readings": readings}), flush=True)
"""
SAME = Prompt.from_tokens(range(20, 28), [range(30, 46), range(50, 66)], range(70, 75))
TURNED = Prompt.from_tokens(range(20, 28), [range(50, 66), range(30, 46)], range(70, 75))


@pytest.fixture(autouse=True)
def checkout_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def outside(code: str) -> Any:
    from benchmarks.engines import OutsidePeer

    return OutsidePeer("fake worker", [sys.executable, "-c", code], "float32")


def test_a_worker_answers_in_lines_of_json_among_other_lines() -> None:
    peer = outside(FAKE_WORKER)
    peer.reset()
    batch = peer.answer([SAME, TURNED], 3)
    peer.close()
    peer.close()
    assert peer.version == "1.2.3"
    assert batch.seconds == 1.0 and len(batch.readings) == 2
    assert batch.readings[0].token_seconds == pytest.approx(0.25)
    assert batch.readings[0].num_computed == SAME.num_tokens - 1


def test_a_worker_that_does_not_start_says_why() -> None:
    with pytest.raises(EngineError, match="fake worker ended; the end of what it printed: no such engine"):
        outside("import sys; sys.exit('no such engine')")


def test_a_worker_that_ends_between_two_answers_says_why() -> None:
    peer = outside("import sys; print('{}', flush=True); input(); sys.exit('out of memory')")
    with pytest.raises(EngineError, match="out of memory"):
        peer.answer([SAME], 1)
    peer.close()


def test_an_engine_that_does_not_start_is_left_out_with_a_note(tmp_path: Path) -> None:
    from benchmarks.engines import open_others

    model = bundled_reader()
    # an interpreter without vLLM: its worker ends at the import
    others = partial(open_others, vllm_python=Path(sys.executable), llama_server=None)
    options = PeerOptions(("on",), capacity="1MiB", others=(others,))
    with ExitStack() as stack:
        subject = Subject(model, {"float32": load_model(model, dtype="float32")}, {})
        peers, notes = open_peers(subject, options, stack)
        assert [peer.name for peer in peers] == ["kvmosaic"]
    assert notes[0].startswith("Our engine in float32: ")
    assert len(notes) == 2 and "No module named 'vllm'" in notes[1]
