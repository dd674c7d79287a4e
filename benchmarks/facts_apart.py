"""Right answers about facts of documents of one kind: by default, read apart, with repair, and read in full.

    python benchmarks/facts_apart.py MODEL --name qwen2.5-coder-0.5b --engine transformers --xquad xquad.en.json

Questions over one of six to sixteen and over two made-up documents, as `kvmosaic eval` draws them, about one of five
paragraphs, of up to sixteen snippets of one article or two, and of all paragraphs of two to four. The made-up documents
are alone, or each in a paragraph of an article. An answer is right if it has the accepted words.
Writes results/facts-apart-NAME.json after every few questions, and a table beside it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from facts import RESULTS, save

from kvmosaic import LLM, SamplingParams
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import contains_any
from kvmosaic.lab.eval.tasks import OneHop, TwoHop
from kvmosaic.prompt import Document

POLICIES = ("none", "first(8)", "names", "query(0.05)", "query(0.08)", "query(0.15)", "query(0.3)", "documents(3)")
BESIDE = ("of its kind", "of prose")
"""Companions: three documents of another question of the set, or three paragraphs, and not the built-in one."""
WAYS = ("full", "default", *POLICIES, *(f"{policy}, {beside}" for policy in POLICIES for beside in BESIDE))
Articles = list[dict[str, Any]]
"""The data of XQuAD."""
SYSTEM = "Answer the question from the documents. Copy the words of the answer, nothing else."
PARAGRAPHS, SNIPPETS, QUESTIONS, TURN = 5, 16, 7, 3
PIECES = ((20, 1), (40, 1), (65, 1), (90, 1), (65, 2), (110, 2))
"""Snippets of whole sentences, at least so many words, of so many articles."""


def about_one(data: Articles, count: int, words: int = 0, together: int = 1) -> Iterator[Case]:
    """A question about each paragraph, with others of its article; or about snippets of them of so many words."""
    chance, cases = Random(5), []
    for number, article in enumerate(data):
        near = (data * 2)[number : number + together]
        texts = [paragraph["context"] for each in near for paragraph in each["paragraphs"]]
        parts = [part for text in texts for part in (snippets(text, words) if words else (text,))]
        for paragraph in article["paragraphs"]:
            asked = chance.choice(paragraph["qas"])
            answers = tuple(answer["text"] for answer in asked["answers"])
            right = [part for part in parts if contains_any(part, answers)]
            others = [part for part in parts if part not in right]
            if len(right) == 1:
                shown = right + chance.sample(others, min(len(others), (SNIPPETS if words else PARAGRAPHS) - 1))
                documents = tuple(Document(text) for text in chance.sample(shown, len(shown)))
                cases.append(Case(asked["id"], "xquad", asked["question"], answers, documents, SYSTEM))
    chance.shuffle(cases)
    yield from cases[:count]


def paragraphs(data: Articles, count: int, articles: int) -> Iterator[Case]:
    """Questions about paragraphs of so many articles, all of them shown: seven questions with the same documents."""
    chance, cases = Random(6), list[Case]()
    for number in range(0, len(data) - articles + 1, articles):
        shown = [paragraph for article in data[number : number + articles] for paragraph in article["paragraphs"]]
        chance.shuffle(shown)
        documents, asked = tuple(Document(each["context"]) for each in shown), list[Case]()
        for paragraph in shown:
            question = chance.choice(paragraph["qas"])
            answers = tuple(answer["text"] for answer in question["answers"])
            if sum(contains_any(each["context"], answers) for each in shown) == 1:
                asked.append(Case(question["id"], "xquad", question["question"], answers, documents, SYSTEM))
        cases += chance.sample(asked, min(len(asked), QUESTIONS))
    yield from cases[:count]


def in_paragraphs(cases: Iterable[Case], data: Articles) -> Iterator[Case]:
    """The same questions where each document is a paragraph, of any article, with the document's text inside."""
    chance = Random(7)
    texts = [paragraph["context"] for article in data for paragraph in article["paragraphs"]]
    for case in cases:
        documents = []
        for document, text in zip(case.documents, chance.sample(texts, len(case.documents)), strict=True):
            sentences = list(snippets(text, 1))
            sentences.insert(chance.randint(1, len(sentences)), document.text.strip())
            documents.append(replace(document, text=" ".join(sentences)))
        yield replace(case, documents=tuple(documents))


def snippets(text: str, words: int) -> Iterator[str]:
    """Its sentences in groups of at least so many words, but for the last one."""
    group = ""
    for sentence in re.split(r'(?<=[.!?]) +(?=[A-Z"])', text):
        group = f"{group} {sentence}".strip()
        if len(group.split()) >= words:
            yield group
            group = ""
    if group:
        yield group


Companions = Mapping[str, Sequence[str] | None]


def answered(llm: LLM, case: Case, ways: Sequence[str], companions: Companions) -> tuple[int, dict[str, float]]:
    """Tokens of the prompt, and 1 for every way in which the answer is right."""
    documents = [{"text": each.text, "title": each.title} for each in case.documents]
    said = [{"role": "system", "content": case.system or ""}, {"role": "user", "content": case.question}]
    num_tokens, right = 0, {}
    for way in ways:
        policy, _, beside = way.partition(", ")
        params = SamplingParams(temperature=0, max_tokens=24, repair=None if policy == "default" else policy)
        (output,) = llm.chat(said, params, documents=documents, companions=companions[beside])
        num_tokens = len(output.prompt_token_ids)
        right[way] = contains_any(output.outputs[0].text, case.answers)
    return num_tokens, right


def table(found: dict[str, dict[str, float]]) -> str:
    """The results as Markdown."""
    names = tuple(next(iter(found.values())))
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
    options.add_argument("--seed", type=int, default=21)
    options.add_argument("--xquad", type=Path)
    options.add_argument("--sets", nargs="+", help="only these, as they are called in the results")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:4])
    given = options.parse_args()
    tasks, count, prose = (OneHop(), OneHop(9), OneHop(12), OneHop(16), TwoHop()), given.count + 1, None
    sets = {str(task): iter(task.cases(given.seed, count)) for task in tasks}
    if given.xquad:
        data: Articles = json.loads(given.xquad.read_text(encoding="utf-8"))["data"]
        prose = [article["paragraphs"][3]["context"] for article in data[-3:]]
        sets |= {f"{task} in paragraphs": in_paragraphs(task.cases(given.seed, count), data) for task in tasks}
        sets[f"one paragraph of {PARAGRAPHS}"] = about_one(data, count)
        for number in (2, 3, 4):
            sets[f"paragraphs of {number} articles"] = paragraphs(data, count, number)
        for words, together in PIECES:
            name = f"snippets of {words} words" + (", two articles" if together == 2 else "")
            sets[name] = about_one(data, count, words, together)
    asked = {name: list(cases) for name, cases in sets.items() if name in (given.sets or sets)}
    beside: dict[str, Companions] = {
        name: {"": None, "of its kind": [each.text for each in cases.pop().documents[:3]], "of prose": prose}
        for name, cases in asked.items()
    }
    sets = {name: iter(cases) for name, cases in asked.items()}
    found = {name: dict.fromkeys(("questions", "tokens of a prompt", *given.ways), 0.0) for name in sets}
    with LLM(given.model, engine=given.engine, num_threads=given.threads) as llm:
        while sets:
            for name in list(sets):
                cases, row = list(islice(sets[name], TURN)), found[name]
                for case in cases:
                    num_tokens, right = answered(llm, case, given.ways, beside[name])
                    row["questions"] += 1
                    row["tokens of a prompt"] += (num_tokens - row["tokens of a prompt"]) / row["questions"]
                    for way, score in right.items():
                        row[way] += score
                if not cases:
                    del sets[name]
                print(name, row, flush=True)
            report = {
                "model": Path(given.model).name,
                "engine": given.engine,
                "threads": given.threads,
                "seed": given.seed,
                "right": found,
            }
            save(f"facts-apart-{given.name}", report)
            (RESULTS / f"facts-apart-{given.name}.md").write_text(f"# Facts read apart: {given.name}\n\n{table(found)}")


if __name__ == "__main__":
    main()
