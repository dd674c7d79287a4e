"""Right answers about facts of documents of one kind, by length: read apart, with repair, and read in full.

    python benchmarks/facts_apart.py MODEL --name qwen2.5-coder-0.5b --engine transformers --xquad xquad.en.json

Questions over one and over two made-up documents, as `kvmosaic eval` draws them, with so many more sentences that say
nothing; and questions about one of five paragraphs of one article. An answer is right if it has the accepted words.
Writes results/facts-apart-NAME.json after every few questions, and a table beside it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

from facts import RESULTS, save

from kvmosaic import LLM, SamplingParams
from kvmosaic.eval.case import Case
from kvmosaic.eval.case_measurement import score_case
from kvmosaic.eval.tasks import OneHop, Task, TwoHop
from kvmosaic.eval.text.names import WORDS
from kvmosaic.prompt import Document

WAYS = ("full", "none", "first(8)", "first(32)")
SYSTEM = "Answer the question from the documents. Copy the words of the answer, nothing else."
PARAGRAPHS, TURN = 5, 3


def longer(task: Task, count: int, num_more: int) -> Iterator[Case]:
    """Cases of a task whose documents have so many more sentences."""
    chance = Random(3)
    for case in task.cases(21, count):
        documents = []
        for document in case.documents:
            sentences = re.split(r"(?<=[.]) ", document.text)
            for filler in chance.sample(list(WORDS["fillers"]), num_more):
                sentences.insert(chance.randint(1, len(sentences)), filler)
            documents.append(replace(document, text=" ".join(sentences)))
        yield replace(case, documents=tuple(documents), metric="contains_any")


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
            cases.append(
                Case(asked["id"], path.stem, asked["question"], answers, tuple(documents), SYSTEM, (), "contains_any")
            )
    chance.shuffle(cases)
    yield from cases[:count]


def answered(llm: LLM, case: Case) -> tuple[int, dict[str, float]]:
    """Tokens of the prompt, and 1 for every way in which the answer is right."""
    documents = [{"text": each.text, "title": each.title} for each in case.documents]
    said = [{"role": "system", "content": case.system or ""}, {"role": "user", "content": case.question}]
    num_tokens, right = 0, {}
    for way in WAYS:
        params = SamplingParams(temperature=0, max_tokens=24, repair=way)
        (output,) = llm.chat(said, params, documents=documents)
        num_tokens = len(output.prompt_token_ids)
        right[way] = score_case(case, output.outputs[0].text) or 0.0
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
    sets = {f"one document of six, {more} more sentences": longer(OneHop(), given.count, more) for more in (0, 8, 18)}
    sets["two documents"] = longer(TwoHop(), given.count, 0)
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
