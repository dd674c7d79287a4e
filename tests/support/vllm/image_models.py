"""Engines of models that also take images, in a process of their own that finds a stand-in for torchvision.

python -m support.vllm.image_models FOLDER    reads {name: asks}, writes {name: trouble, what was tested, answers}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.vllm.asking import Answer, Ask

STAND_INS = Path(__file__).parent / "stand_ins"
OPTIONS: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}}


def answers(folder: Path, asked: Mapping[str, Sequence[Ask]], *, plugin: bool = True) -> dict[str, dict[str, Any]]:
    """What engines of these models answer, in this order, with `trouble` and `tested`."""
    wanted = {name: [ask.to_json() for ask in asks] for name, asks in asked.items()}
    found = subprocess.run(
        [sys.executable, "-m", __name__, str(folder)],
        input=json.dumps({"plugin": plugin, "asked": wanted}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(STAND_INS), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-5000:]
    said: dict[str, dict[str, Any]] = json.loads(found.stdout.splitlines()[-1])
    return {name: {**each, "answers": [Answer(**one) for one in each["answers"]]} for name, each in said.items()}


def tested(engine: Any) -> str:
    """What was tested when the engine started."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return str(get_kv_transfer_group()._worker.start_check.tested)


def main() -> None:
    """Runs one engine after the other."""
    from support.vllm.forking import ForkedEngine
    from support.vllm.image_models import tested as named  # by a name that the fork finds, not __main__'s

    given = json.load(sys.stdin)
    said = {}
    for name, asks in given["asked"].items():
        engine = ForkedEngine(Path(sys.argv[1]) / name, plugin=given["plugin"], **OPTIONS)
        found = [engine.call("answer", asks=[ask])[0] for ask in asks]
        facts = {"trouble": engine.call("trouble"), "tested": engine.call(named)} if given["plugin"] else {}
        said[name] = {**facts, "answers": found}
        engine.stop()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
