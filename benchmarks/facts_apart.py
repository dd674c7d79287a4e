"""Right answers about facts of made-up documents, of one kind or of several: read apart beside read in full.

    python benchmarks/facts_apart.py FILE.gguf --name qwen2.5-coder-0.5b

Runs documents read apart, `names` and full attention on the same questions of `kvmosaic eval`'s tasks, and writes
results/facts-apart-NAME.json. An answer is right if it has the accepted words.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvmosaic import LLM, SamplingParams
from kvmosaic.bench.results import facts
from kvmosaic.eval.tasks import OneHop, TwoHop

WAYS = {"apart": "none", "names": "names", "full": "full"}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measures, and writes after every question."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--name", required=True)
    options.add_argument("--count", type=int, default=100)
    given = options.parse_args()
    tasks = (OneHop(), TwoHop())
    right = {str(task): dict.fromkeys(WAYS, 0) | {"asked": 0} for task in tasks}
    with LLM(given.model, num_threads=2) as llm:
        for task in tasks:
            counts = right[str(task)]
            for case in task.cases(21, given.count):
                documents = [{"text": each.text, "title": each.title} for each in case.documents]
                said = [{"role": "system", "content": case.system or ""}, {"role": "user", "content": case.question}]
                for way, repair in WAYS.items():
                    params = SamplingParams(temperature=0, max_tokens=32, repair=repair)
                    (output,) = llm.chat(said, params, documents=documents)
                    text = output.outputs[0].text.lower()
                    counts[way] += any(answer.lower() in text for answer in case.answers)
                counts["asked"] += 1
                found = {"model": Path(given.model).name, "right": right, "facts": facts(2)}
                (RESULTS / f"facts-apart-{given.name}.json").write_text(json.dumps(found, indent=1) + "\n")
            print(task, counts, flush=True)


if __name__ == "__main__":
    main()
