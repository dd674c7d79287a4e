"""How near is near: composed reading beside full attention in the same order, and full attention in another order.

    python scripts/fetch_xquad.py data
    python benchmarks/document_order.py MODEL --data data/xquad.en.json --name smollm2
    python benchmarks/document_order.py MODEL --data test.json --adapter near=adapter --name smollm2-adapted

Several questions are asked about the same documents. Full attention in the given order answers them greedily; each
other reading then gives a distribution for every token of these answers:

    another order    full attention, the first document last: what no application would call an error
    sequential, …    documents computed apart and read there, after the system text or a lead-in, nothing repaired

and with each adapter. The loss is that of the accepted answer, above full attention's, with its standard error.
Readings are dense forwards of packed rows (`kvmosaic.lab.adapt.distillation`), which tests hold against the engine.
Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

import torch
from facts import RESULTS, save
from log_probabilities import Nearness
from nearness import SAW
from rich.progress import track
from torch import Tensor

from kvmosaic import LLM, ChunkCacheConfig
from kvmosaic.assembly import adapter_folders
from kvmosaic.lab.adapt.corpus import lessons_of
from kvmosaic.lab.adapt.distillation import Lesson, PackedRows, composed_rows, forward, ordinary_rows
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import accepted_tokens, prompt_of
from kvmosaic.lab.eval.loaders import load
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel, load_model

OTHER_ORDER = "full attention, another order"
STRATEGIES = ("sequential", "shared")
CONTEXTS = ("system", "companions")


@dataclass
class Sums(Nearness):
    """Sums over tokens of full attention's answers, and over accepted answers."""

    losses: list[float] = field(default_factory=list)
    """Loss of each accepted answer above full attention's, in nats per token."""

    def row(self) -> dict[str, float]:
        """Means, and the standard error of the loss."""
        error = stdev(self.losses) / len(self.losses) ** 0.5
        return {**super().row(), "loss": mean(self.losses), "loss_error": error, "answers": len(self.losses)}


def drawn(cases: Sequence[Case], num_documents: int, num_questions: int, number: int) -> list[Case]:
    """Questions about the same documents, each about one of them."""
    chance = Random(f"{num_documents} {number}")
    about: dict[str, list[Case]] = {}
    for case in cases:
        about.setdefault(case.documents[case.needs[0]].text, []).append(case)
    texts = chance.sample(sorted(about), num_documents)
    documents = tuple(about[text][0].documents[about[text][0].needs[0]] for text in texts)
    asked = [case for text in texts for case in about[text]]
    return [replace(case, documents=documents) for case in chance.sample(asked, min(num_questions, len(asked)))]


@dataclass(frozen=True)
class Asked:
    """A lesson, and accepted answers to its questions as further continuations."""

    lesson: Lesson
    accepted: list[tuple[int, ...]]

    @property
    def continuations(self) -> list[tuple[int, ...]]:
        """Questions with full attention's answers, then with the accepted ones."""
        pairs = zip(self.lesson.questions, self.accepted, strict=True)
        return [*self.lesson.continuations, *((*question, *answer) for question, answer in pairs)]

    def read(self, model: LoadedModel, packed: PackedRows, adapter: str) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T, V] after each token before one of the answers; losses of the accepted ones."""
        ends = [*self.lesson.answers, *self.accepted]
        parts = [
            torch.arange(rows.stop - len(end) - 1, rows.stop - 1)
            for rows, end in zip(packed.continuations, ends, strict=True)
        ]
        with torch.no_grad():
            found = forward(model, packed, torch.cat(parts), adapter).float().log_softmax(-1)
        each = found.split([len(part) for part in parts])
        count = len(self.lesson.answers)
        losses = [
            -rows[torch.arange(len(end)), torch.tensor(end)].mean()
            for rows, end in zip(each[count:], self.accepted, strict=True)
        ]
        return torch.cat(each[:count]), torch.stack(losses)


def measured(
    model: LoadedModel, llm: LLM, cases: Sequence[Case], sums: dict[str, Sums], options: argparse.Namespace
) -> None:
    """Adds what all readings of some questions give."""
    (lesson,) = lessons_of(llm, [cases], options.answer_tokens)
    asked = Asked(lesson, [accepted_tokens(llm, case) for case in cases])
    prompt, continuations = asked.lesson.prompt, asked.continuations
    expected, losses = asked.read(model, ordinary_rows(prompt, continuations), "")
    other = prompt_of(llm, cases[0].turned())

    def readings() -> Iterator[tuple[str, PackedRows, str]]:
        yield OTHER_ORDER, ordinary_rows(other, continuations), ""
        for strategy, context in product(options.strategies, options.contexts):
            rows = composed_rows(arrange(prompt, strategy, context), continuations)
            for name, adapter in {"": "", **{key: each.digest for key, each in model.adapters.items()}}.items():
                yield f"{strategy}, {SAW[context]}{name and f', {name}'}", rows, adapter

    for name, rows, adapter in readings():
        found, own = asked.read(model, rows, adapter)
        one = sums.setdefault(name, Sums())
        one.add(expected, found)
        one.losses += (own - losses).tolist()


def table(rows: dict[str, dict[str, float]]) -> str:
    """In Markdown."""
    lines = ["| reading | divergence | equal greedy tokens | loss |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['divergence']:.4f} | {row['agreement']:.1%} | {row['loss']:+.3f} ± {row['loss_error']:.3f} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--data", type=Path, required=True, help="questions, each about one document")
    parser.add_argument("--adapter", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--documents", type=int, nargs="+", default=[3, 6], help="of a prompt")
    parser.add_argument("--lessons", type=int, default=16, help="for each number of documents")
    parser.add_argument("--questions", type=int, default=6, help="of each lesson")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="model", help="of the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    adapters = adapter_folders(options.adapter)
    model = load_model(options.model, dtype="float32", device="cpu", prepack="never", adapters=adapters)
    cases = [case for case in load(options.data, None, None, documents=1, seed=0) if case.answers]
    report: dict[str, Any] = {"model": Path(options.model).name, "data": options.data.name, "threads": options.threads}
    text = [f"# Reading apart beside full attention: {report['model']}, {report['data']}"]
    with LLM(model, profile=False, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB")) as llm:
        for count in options.documents:
            sums: dict[str, Sums] = {}
            for number in track(range(options.lessons), f"{count} documents"):
                measured(model, llm, drawn(cases, count, options.questions, number), sums, options)
            rows = {name: each.row() for name, each in sums.items()}
            report[f"{count} documents"] = rows
            num_answers = next(iter(rows.values()))["answers"]
            text += [f"## {count} documents, {num_answers} questions", table(rows)]
            print(f"\n{text[-2]}\n\n{text[-1]}", flush=True)
    path = save(f"document_order-{options.name}", report)
    path.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    assert path.parent == RESULTS


if __name__ == "__main__":
    main()
