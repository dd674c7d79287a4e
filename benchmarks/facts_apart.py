"""Right answers about facts of documents of one kind: by default, read apart, with repair, and read in full.

    python benchmarks/facts_apart.py MODEL --name qwen2.5-coder-0.5b --engine transformers --xquad xquad.en.json

Questions over one of six or sixteen and over two made-up documents, as `kvmosaic eval` draws them, and about one of
five paragraphs of one article. An answer is right if it has the accepted words. Writes results/facts-apart-NAME.json
after every few questions, and a table beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from facts import RESULTS, save

from kvmosaic import LLM, SamplingParams
from kvmosaic.eval.case import Case
from kvmosaic.eval.case_measurement import contains_any
from kvmosaic.eval.tasks import OneHop, TwoHop
from kvmosaic.prompt import Document

WAYS = {"full": "full", "default": None, "none": "none", "first(8)": "first(8)"}
SYSTEM = "Answer the question from the documents. Copy the words of the answer, nothing else."
PARAGRAPHS, TURN = 5, 3


def articles(path: Path, count: int) -> Iterator[Case]:
    """A question about each paragraph, with others of its article."""
    chance, cases = Random(5), []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for number, paragraph in enumerate(article["paragraphs"]):
            asked = chance.choice(paragraph["qas"])
            others = chance.sample(texts[:number] + texts[number + 1 :], PARAGRAPHS - 1)
            documents = chance.sample([Document(text) for text in (texts[number], *others)], PARAGRAPHS)
            answers = tuple(answer["text"] for answer in asked["answers"])
            cases.append(Case(asked["id"], path.stem, asked["question"], answers, tuple(documents), SYSTEM))
    chance.shuffle(cases)
    yield from cases[:count]


def answered(llm: LLM, case: Case) -> tuple[int, dict[str, float]]:
    """Tokens of the prompt, and 1 for every way in which the answer is right."""
    documents = [{"text": each.text, "title": each.title} for each in case.documents]
    said = [{"role": "system", "content": case.system or ""}, {"role": "user", "content": case.question}]
    num_tokens, right = 0, {}
    for way, repair in WAYS.items():
        params = SamplingParams(temperature=0, max_tokens=24, repair=repair)
        (output,) = llm.chat(said, params, documents=documents)
        num_tokens = len(output.prompt_token_ids)
        right[way] = contains_any(output.outputs[0].text, case.answers)
    return num_tokens, right


def table(found: dict[str, dict[str, float]]) -> str:
    """The results as Markdown."""
    names = ("questions", "tokens of a prompt", *WAYS)
    rows = [f"| {name} | " + " | ".join(f"{row[each]:.0f}" for each in names) + " |" for name, row in found.items()]
    return "\n".join([f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", *rows]) + "\n"


def main() -> None:
    """Measures the sets in turns."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--name", required=True)
    options.add_argument("--engine", default="auto")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--count", type=int, default=150)
    options.add_argument("--xquad", type=Path)
    given = options.parse_args()
    tasks = (OneHop(), OneHop(16), TwoHop())
    sets = {str(task): iter(task.cases(21, given.count)) for task in tasks}
    if given.xquad:
        sets[f"one paragraph of {PARAGRAPHS}"] = articles(given.xquad, given.count)
    found = {name: dict.fromkeys(("questions", "tokens of a prompt", *WAYS), 0.0) for name in sets}
    with LLM(given.model, engine=given.engine, num_threads=given.threads) as llm:
        while sets:
            for name in list(sets):
                cases, row = list(islice(sets[name], TURN)), found[name]
                for case in cases:
                    num_tokens, right = answered(llm, case)
                    row["questions"] += 1
                    row["tokens of a prompt"] += (num_tokens - row["tokens of a prompt"]) / row["questions"]
                    for way, score in right.items():
                        row[way] += score
                if not cases:
                    del sets[name]
                print(name, row, flush=True)
            report = {"model": Path(given.model).name, "engine": given.engine, "threads": given.threads, "right": found}
            save(f"facts-apart-{given.name}", report)
            (RESULTS / f"facts-apart-{given.name}.md").write_text(f"# Facts read apart: {given.name}\n\n{table(found)}")


if __name__ == "__main__":
    main()
