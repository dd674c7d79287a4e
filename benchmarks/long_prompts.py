"""Answers beyond the positions a model was trained for: questions over documents of 1, 2, 4, … times as many tokens.

    python scripts/fetch_xquad.py data
    python benchmarks/long_prompts.py MODEL --haystack data/xquad.en.json data/xquad.de.json --name smollm2
    python benchmarks/long_prompts.py reader --name reader

Needles are facts about invented things (the task "needle" of `kvmosaic eval`), each in a document of its own. Without
`--haystack` all other documents are needles too; with it they are the paragraphs of files in the format of SQuAD, whose
questions are asked as well. All questions of a set have the same documents, and a longer prompt has those of the
shorter ones, in another order. Ways of answering:

    full   every document, pasted as one text and read with full attention, where they fit the positions
    all    every document, with the strategy `auto`: `sequential` where they fit the positions, otherwise `shared`
    shared every document, with `shared` positions also where they would fit one after the other
    cut    the first documents that fit the positions, `sequential`; the others are left out
    alone  only the document with the answer

Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from facts import RESULTS, save

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import accepted_tokens, contains_any, prompt_of
from kvmosaic.lab.eval.loaders import load_squad
from kvmosaic.lab.eval.tasks import Needle
from kvmosaic.prompt import Document

SEED = 7
ROOM = 128
"""Positions left for system text, question and answer."""
ANSWER_TOKENS = 24
SYSTEM = "Answer the question from the documents, in a few words."


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the number of the document that answers it."""

    case: Case
    document: int


def needles(count: int) -> Iterator[Case]:
    """Questions, each with the one document that answers it."""
    for case in Needle(2).cases(SEED, count):
        (needed,) = case.needs
        yield replace(case, documents=(case.documents[needed],), needs=(0,), system=SYSTEM, metric="contains_any")


def questions_of(files: Sequence[Path], count: int) -> tuple[dict[str, list[Question]], list[Document]]:
    """Questions by set, and all documents: those of the questions first."""
    if not files:
        cases = list(needles(5_000))
        documents = [case.documents[0] for case in cases]
        return {"needle": [Question(case, number) for number, case in enumerate(cases[:count])]}, documents
    asked, own = {"needle": list(needles(count)), "xquad": []}, set[str]()
    for case in load_squad(files[0], None, 1, SEED):
        if len(asked["xquad"]) < count and case.documents[0].text not in own:
            own.add(case.documents[0].text)
            asked["xquad"].append(replace(case, system=SYSTEM, metric="contains_any"))
    found, documents = dict[str, list[Question]](), list[Document]()
    for name, cases in asked.items():
        found[name] = [Question(case, len(documents) + number) for number, case in enumerate(cases)]
        documents += [case.documents[0] for case in cases]
    # translations of a document with an answer would answer it, too
    places = {case.id for case in asked["xquad"]}
    others = dict[str, None]()
    for file in files:
        by_text: dict[str, set[str]] = {}
        for case in load_squad(file, None, 1, SEED):
            by_text.setdefault(case.documents[0].text, set()).add(case.id)
        others |= dict.fromkeys(sorted(text for text, ids in by_text.items() if not ids & places))
    texts = list(others)
    Random(SEED).shuffle(texts)
    return found, documents + [Document(text) for text in texts]


class Haystack:
    """The documents of every length, as prompts of one model."""

    def __init__(self, llm: LLM, documents: list[Document]) -> None:
        self.llm = llm
        self.documents = documents
        tokens = [len(llm.model.tokenizer(document.text).input_ids) for document in documents]
        self.num_tokens = [count + 8 for count in tokens]  # and the template's words

    def up_to(self, num_tokens: int, first: int) -> list[int]:
        """Numbers of documents of so many tokens, the first ones among them, in an order of this length."""
        chosen, total = list[int](), 0
        for number, count in enumerate(self.num_tokens):
            if total + count > num_tokens:
                if number < first:
                    raise SystemExit("the documents with the answers alone do not fit; ask fewer questions")
                break
            chosen.append(number)
            total += count
        else:
            raise SystemExit(f"the documents have {total} tokens, {num_tokens} are needed; give more files")
        Random(f"{SEED}:{num_tokens}").shuffle(chosen)
        return chosen

    def cut(self, chosen: Sequence[int], num_tokens: int) -> list[int]:
        """The first of them that have at most so many tokens."""
        kept, total = list[int](), 0
        for number in chosen:
            total += self.num_tokens[number]
            if total > num_tokens:
                break
            kept.append(number)
        return kept

    def prompt(self, case: Case, chosen: Sequence[int]) -> Prompt:
        return prompt_of(self.llm, replace(case, documents=tuple(self.documents[n] for n in chosen), needs=()))


def ask(llm: LLM, prompt: Prompt, case: Case, strategy: str | None, repair: str | None) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, repair=repair)
    (output,) = llm.generate([prompt], params, position_strategy=strategy)
    (scored,) = llm.score([prompt], [accepted_tokens(llm, case)], position_strategy=strategy, repair=repair)
    text = output.outputs[0].text.strip()
    return {
        "id": case.id,
        "right": contains_any(text, case.answers),
        "loss": scored.loss,
        "tokens": prompt.num_tokens,
        "first_seconds": output.metrics.time_to_first_token,
        "composition": output.reuse.composition,
    }


def measure(stack: Haystack, asked: list[Question], chosen: list[int], way: str, repair: str | None) -> dict[str, Any]:
    rows = []
    for question in asked:
        here = [question.document] if way == "alone" else chosen
        strategy, policy = ("shared" if way == "shared" else None), ("full" if way == "full" else repair)
        rows.append(ask(stack.llm, stack.prompt(question.case, here), question.case, strategy, policy))
    seconds = sorted(row["first_seconds"] for row in rows)
    return {
        "questions": len(rows),
        "documents": 1 if way == "alone" else len(chosen),
        "tokens": max(row["tokens"] for row in rows),
        "right": sum(row["right"] for row in rows),
        "loss": sum(row["loss"] for row in rows) / len(rows),
        "first_seconds_median": seconds[len(seconds) // 2],
        "composition": rows[-1]["composition"],
    }


def line_of(row: dict[str, Any]) -> str:
    cells = [
        row["set"],
        f"{row['times']}x" if row["way"] != "alone" else "",
        row["way"],
        row["composition"].partition(":")[0],
        str(row["documents"]),
        f"{row['tokens']:,}",
        f"{row['right']:.0f} of {row['questions']}",
        f"{row['loss']:.2f}",
        f"{row['first_seconds_median']:.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--haystack", nargs="*", type=Path, default=[])
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--times", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--positions", type=int, help="length that the model was trained for, if its config says more")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repair", help="policy; default: that of the settings")
    parser.add_argument("--chunk-cache", default="6GiB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", required=True)
    given = parser.parse_args()
    llm = LLM(
        given.model,
        dtype=given.dtype,
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size=given.chunk_cache),
        engine_config=EngineConfig(num_threads=given.threads, request_cache_size="1GiB", max_model_len=given.positions),
        profile=False,
    )
    positions = llm.engine.max_positions
    assert positions is not None
    asked, documents = questions_of(given.haystack, given.questions)
    stack, rows = Haystack(llm, documents), list[dict[str, Any]]()
    first = 1 + max(question.document for each in asked.values() for question in each)
    started = time.monotonic()
    for times in given.times:
        chosen = stack.up_to(times * positions - ROOM, first)
        ways = {"all": chosen}
        if times == 1:
            ways = {"alone": [], "full": chosen, "all": chosen, "shared": chosen}
        else:
            ways["cut"] = stack.cut(chosen, positions - ROOM)
        for way, here in ways.items():
            for name, questions in asked.items():
                found = measure(stack, questions, here, way, given.repair)
                rows.append({"set": name, "times": times, "way": way, **found})
                print(f"{time.monotonic() - started:7.1f} s  {line_of(rows[-1])}", flush=True)
    name = f"long_prompts-{given.name}"
    report = {"model": Path(given.model).name, "positions": positions, "dtype": given.dtype, "rows": rows}
    path = save(name, report)
    header = "set | length | way | composed | documents | tokens | right | loss | first token"
    lines = [
        f"# Documents beyond the {positions:,} positions of {Path(given.model).name}",
        "",
        f"{given.questions} questions of each set, the same documents for all; greedy answers that contain the "
        "accepted one; loss of the accepted answer in nats per token; median time to the first token, documents "
        "cached.",
        "",
        f"| {header} |",
        "|---" * (header.count("|") + 1) + "|",
        *map(line_of, rows),
    ]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print(path)


if __name__ == "__main__":
    main()
