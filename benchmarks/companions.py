"""Companions: what a document should have met when it was computed, for answers over similar documents to be right.

    python benchmarks/companions.py measure MODEL --name qwen2.5-coder-0.5b [--device cuda] --prose data/xquad.en.json
    python benchmarks/companions.py report [--trace ragpulse/0_trace.jsonl]

A document that was computed alone was the first one; four such documents are four first ones, and models mix them up.
Here each document of a prompt is computed after others, its *companions*, which the prompt does not contain, and then
read at its place. Each question is answered with every way of choosing companions:

    right        answers with the asked values and no other document's, by the right ones of full attention
    divergence   from full attention, in nats per token, over the tokens of its own answer
    copies       of a document that can exist, one for each place that changes what it is computed after
    reuse        passage tokens of RAGPulse that are read from a copy, unlimited cache: order as sent, order chosen

Records are those of the task `similar`. Models are read with transformers alone (`benchmarks/apart.py`). Results go to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from apart import Apart, Ids, Reader, Reading
from facts import RESULTS, save
from log_probabilities import Nearness
from replay import Trace, TraceBlock, read_trace
from rich.progress import track
from torch import Tensor
from transformers import AutoTokenizer

from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import score_case
from kvmosaic.lab.eval.loaders import load
from kvmosaic.lab.eval.tasks import Similar
from kvmosaic.lab.eval.text.recipes import MAX_RECORDS
from kvmosaic.prompt import Document
from kvmosaic.prompt.companions import paragraph_for

ANSWER_TOKENS = 40
MARK = "@@documents@@"
WORD = re.compile(r"\w+")
USUAL_CHARACTERS = 3_000
"""Of the documents of one question; of longer ones, fewer questions are read at once."""


@dataclass(frozen=True)
class Companions:
    """What a document is computed after."""

    count: Callable[[int, int], int]
    """How many companions, of its place (from 0) and the number of documents."""
    pool: str = "kind"
    """Which ones: of the same `kind`, of `others`, `prose`, the package's `lead-in`; `own`: different ones for each
    document; `prompt`: the first is a document of the same prompt."""
    is_shared: bool = False
    repair: str = ""
    """What is computed again: the first 8 or 16 tokens of each document, the `words` of the question, `names`, which
    are words with a digit or a capital letter, `numbers`, or what is `new`: words (or names) that its companions lack.
    """

    def copies(self, num_places: int) -> int:
        """Copies of one document, over so many places."""
        return len({self.count(place, num_places) for place in range(num_places)})


def same(count: int) -> Callable[[int, int], int]:
    """As many for all."""
    return lambda place, total: count


def but_first(count: int) -> Callable[[int, int], int]:
    """As many for all but the first, which has none."""
    return lambda place, total: count if place else 0


def by_place(limit: int = MAX_RECORDS) -> Callable[[int, int], int]:
    """As many as documents before it, up to a limit."""
    return lambda place, total: min(place, limit)


WAYS = {
    "none": Companions(same(0)),
    "none, first(8)": Companions(same(0), repair="8"),
    "lead-in": Companions(same(1), "lead-in"),
    "lead-in, first(8)": Companions(same(1), "lead-in", repair="8"),
    "lead-in, the first 0": Companions(but_first(1), "lead-in"),
    "lead-in, the first 0, first(8)": Companions(but_first(1), "lead-in", repair="8"),
    "by place": Companions(by_place()),
    **{f"by place, at most {limit}": Companions(by_place(limit)) for limit in (1, 2, 3, 4)},
    "by place, in pairs": Companions(lambda place, total: (place + 1) // 2 * 2),
    "by another's place": Companions(lambda place, total: (place + total // 2) % total),
    **{f"{count}, the first 0": Companions(but_first(count)) for count in (1, 2, 3, 4)},
    **{f"{count} for all": Companions(same(count)) for count in (1, 2, 3, 4)},
    "by place, of other kinds": Companions(by_place(), "others"),
    "3 of other kinds, the first 0": Companions(but_first(3), "others"),
    "by place, prose": Companions(by_place(), "prose"),
    "3 of its own, the first 0": Companions(but_first(3), "own"),
    "by place, one is in the prompt": Companions(by_place(), "prompt"),
    "by place, at most 3, first(8)": Companions(by_place(3), repair="8"),
    **{f"{count}, the first 0, first(8)": Companions(but_first(count), repair="8") for count in (1, 3)},
    "3 for all, first(8)": Companions(same(3), repair="8"),
    "3 for all, first(16)": Companions(same(3), repair="16"),
    "none, words of the question": Companions(same(0), repair="words"),
    "none, names": Companions(same(0), repair="names"),
    "3, the first 0, words of the question": Companions(but_first(3), repair="words"),
    "3, the first 0, names": Companions(but_first(3), repair="names"),
    "by place, at most 3, words of the question": Companions(by_place(3), repair="words"),
    "6 for all": Companions(same(6)),
    "by place and 1": Companions(lambda place, total: place + 1),
    "0, 2, 2, 4 and more": Companions(lambda place, total: (0, 2, 2, 4)[min(place, 3)]),
    "by place, at most 3, names": Companions(by_place(3), repair="names"),
    "by place, names": Companions(by_place(), repair="names"),
    "3 for all, names": Companions(same(3), repair="names"),
    "by place, at most 3, new words": Companions(by_place(3), repair="new"),
    "by place, at most 3, new names": Companions(by_place(3), repair="new names"),
    "3, the first 0, new words": Companions(but_first(3), repair="new"),
    "3 for all, new words": Companions(same(3), repair="new"),
    "by place, at most 3, numbers": Companions(by_place(3), repair="numbers"),
    "3 for all, numbers": Companions(same(3), repair="numbers"),
    "by place, at most 3, first(16)": Companions(by_place(3), repair="16"),
    "0, 1, 3 and more": Companions(lambda place, total: (0, 1, 3)[min(place, 2)]),
    "shared, none": Companions(same(0), is_shared=True),
    "shared, by place": Companions(by_place(), is_shared=True),
    "shared, 3 for all": Companions(same(3), is_shared=True),
}
FEWER = tuple(
    name
    for name in WAYS
    if not any(
        word in name for word in ("kinds", "own", "another", "one is in", "shared", "4", "6", "none, w", "none, n")
    )
)
OF_PROSE = (
    "none",
    "none, first(8)",
    "none, names",
    "lead-in",
    "lead-in, first(8)",
    "lead-in, the first 0",
    "lead-in, the first 0, first(8)",
    "1, the first 0",
    "1, the first 0, first(8)",
    "3, the first 0, first(8)",
    "3 for all, first(8)",
    "by place, at most 3",
    "by place, at most 3, first(8)",
    "by place, at most 3, names",
)
FULL, OTHER_ORDER = "full attention", "full attention, the first document last"


@dataclass(frozen=True)
class Asked:
    """A case, and texts that its documents can be computed after."""

    case: Case
    pools: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Block:
    """Questions of one sort."""

    name: str
    asked: Sequence[Asked]
    ways: Sequence[str]


def records(task: Similar, prose: Sequence[str], seed: int, count: int, least: int, most: int) -> Iterator[Asked]:
    """Cases over `least` to `most` of 12 records of a kind, the others of which are companions."""
    chance = Random(f"{task} {seed}")
    cases = replace(task, documents=MAX_RECORDS).cases(seed, 3 * count)
    for number in range(count):
        case, size = cases[number], least + number % (most - least + 1)
        needed = [case.documents[each] for each in case.needs]
        rest = [document for each, document in enumerate(case.documents) if each not in case.needs]
        documents = [*rest[: size - len(needed)], *needed]
        chance.shuffle(documents)
        kind = case.documents[0].text.split()[0]
        other = next(each for each in cases[number + 1 :] if each.documents[0].text.split()[0] != kind)
        pools = {
            "kind": tuple(document.text for document in rest[size - len(needed) :]),
            "others": tuple(document.text for document in other.documents),
            "prose": tuple(chance.sample(prose, MAX_RECORDS)),
            "lead-in": (paragraph_for(document.text for document in documents),),
        }
        needs = tuple(documents.index(each) for each in needed)
        yield Asked(replace(case, documents=tuple(documents), needs=needs), pools)


def paragraphs(path: Path, seed: int, count: int, least: int, most: int) -> Iterator[Asked]:
    """Cases over paragraphs of prose, with others of the same file as companions."""
    chance = Random(seed)
    texts = sorted({document.text for case in load(path, documents=1) for document in case.documents})
    each = max(1, count // (most - least + 1))
    for size in range(least, most + 1):
        for case in load(path, None, each, documents=size, seed=seed + size):
            used = {document.text for document in case.documents}
            others = tuple(chance.sample([text for text in texts if text not in used], MAX_RECORDS))
            yield Asked(case, {"kind": others, "prose": others, "others": others, "lead-in": (paragraph_for(others),)})


def padded(asked: Asked, texts: Sequence[str], chance: Random, characters: int) -> Asked:
    """The same with prose after every record, other prose after each."""

    def longer(record: str) -> str:
        while len(record) < characters:
            record += "\n" + chance.choice(texts)
        return record[:characters]

    documents = tuple(Document(longer(document.text)) for document in asked.case.documents)
    pools = {name: tuple(map(longer, pool)) for name, pool in asked.pools.items() if name != "lead-in"}
    return Asked(replace(asked.case, documents=documents), {**pools, "lead-in": asked.pools["lead-in"]})


class Tokens:
    """Prompts as tokens, as the engine's encoder divides them."""

    def __init__(self, path: Path) -> None:
        where: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path.parent if where else path, **where)

    def ids(self, text: str) -> Ids:
        """Of a text between others."""
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def reading(self, asked: Asked, way: Companions | None) -> Reading:
        """A prompt as it is read; None: in full."""
        case = asked.case
        messages = [
            {"role": "system", "content": f"{case.system}\n\n{MARK}"},
            {"role": "user", "content": case.question},
        ]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        system, question = map(self.ids, text.split(MARK))
        documents = [self.ids(f"{document.text}\n\n") for document in case.documents]
        total, apart = len(documents), []
        for place, ids in enumerate(documents):
            behind: Sequence[Ids] = documents[:place]
            if way is not None:
                behind = self._companions(asked, way, place, documents)[: way.count(place, total)]
            apart.append(Apart(ids, tuple(behind)))
        if way is None:
            return Reading(system, tuple(apart), question)
        repaired = tuple(
            self._repaired(document.text, case.question, asked, way, place) if apart[place].behind or place else ()
            for place, document in enumerate(case.documents)
        )
        return Reading(system, tuple(apart), question, way.is_shared, repaired)

    def _repaired(self, text: str, question: str, asked: Asked, way: Companions, place: int) -> Ids:
        """Numbers of the tokens that are computed again."""
        if not way.repair:
            return ()
        found = self.tokenizer(f"{text}\n\n", add_special_tokens=False, return_offsets_mapping=True)
        spans = found.offset_mapping
        if way.repair.isdigit():
            return tuple(range(min(int(way.repair), len(spans))))
        companions = asked.pools[way.pool][: way.count(place, len(asked.case.documents))]
        known = {word.casefold() for other in companions for word in WORD.findall(other)}
        is_repaired: dict[str, Callable[[str], bool]] = {
            "words": lambda word: word.casefold() in {each.casefold() for each in WORD.findall(question)},
            "names": lambda word: not word.islower(),
            "numbers": lambda word: any(map(str.isdigit, word)),
            "new": lambda word: word.casefold() not in known,
            "new names": lambda word: word.casefold() not in known and not word.islower(),
        }
        marks = [match.span() for match in WORD.finditer(text) if is_repaired[way.repair](match[0])]
        return tuple(
            number
            for number, (first, last) in enumerate(spans)
            if any(first < end and start < last for start, end in marks)
        )

    def _companions(self, asked: Asked, way: Companions, place: int, documents: Sequence[Ids]) -> Sequence[Ids]:
        pool = asked.pools["kind" if way.pool in ("own", "prompt") else way.pool]
        texts = [self.ids(f"{text}\n\n") for text in pool]
        if way.pool == "own":
            return texts[place:] + texts[:place]
        return [documents[0 if place == len(documents) - 1 else -1], *texts] if way.pool == "prompt" else texts


@dataclass
class Sums(Nearness):
    """What one way gave, over the cases of a block."""

    right: int = 0
    kept: int = 0
    """Right where full attention is."""
    num_cases: int = 0
    num_repaired: int = 0
    num_document_tokens: int = 0

    def row(self) -> dict[str, Any]:
        """Means, and counts."""
        counts = {"right": self.right, "kept": self.kept, "cases": self.num_cases}
        return {**counts, **super().row(), "repaired": self.num_repaired / max(1, self.num_document_tokens)}


class Study:
    """One model."""

    def __init__(self, reader: Reader, tokens: Tokens, batch: int) -> None:
        self.reader, self.tokens, self.batch = reader, tokens, batch

    def measure(self, block: Block) -> dict[str, dict[str, Any]]:
        """Rows by the name of a way."""
        sums = {name: Sums() for name in (FULL, OTHER_ORDER, *block.ways)}
        characters = sum(len(document.text) for each in block.asked for document in each.case.documents)
        size = max(1, min(self.batch, self.batch * len(block.asked) * USUAL_CHARACTERS // characters))
        for start in track(range(0, len(block.asked), size), block.name):
            self._batch(block.asked[start : start + size], block.ways, sums)
        return {name: {**each.row(), "of": sums[FULL].right} for name, each in sums.items()}

    def _batch(self, asked: Sequence[Asked], ways: Sequence[str], sums: dict[str, Sums]) -> None:
        readings = [self.tokens.reading(each, None) for each in asked]
        composed = self.reader.compose(readings)
        answers = self.reader.answers(composed, readings, ANSWER_TOKENS)
        expected = self.reader.distributions(composed, readings, answers)
        is_right = [self._is_right(each, answer) for each, answer in zip(asked, answers, strict=True)]
        self._add(sums[FULL], asked, is_right, answers, expected, expected)
        turned = [replace(each, case=each.case.turned()) for each in asked]
        everything = {OTHER_ORDER: [self.tokens.reading(each, None) for each in turned]}
        everything |= {name: [self.tokens.reading(each, WAYS[name]) for each in asked] for name in ways}
        for name, these in everything.items():
            self.reader.forget()
            sums[name].num_repaired += sum(len(tokens) for reading in these for tokens in reading.repaired)
            sums[name].num_document_tokens += sum(len(each.ids) for reading in these for each in reading.documents)
            composed = self.reader.compose(these)
            found = self.reader.distributions(composed, these, answers)
            greedy = [tuple(each.argmax(-1).tolist()) for each in found]
            differ = [number for number, answer in enumerate(answers) if greedy[number] != answer]
            said = list(answers)
            if differ:
                own = self.reader.answers(composed.rows(differ), [these[each] for each in differ], ANSWER_TOKENS)
                for number, answer in zip(differ, own, strict=True):
                    said[number] = answer
            self._add(sums[name], asked, is_right, said, expected, found)
        self.reader.forget()

    def _add(
        self,
        sums: Sums,
        asked: Sequence[Asked],
        is_right: Sequence[bool],
        said: Sequence[Ids],
        expected: Sequence[Tensor],
        found: Sequence[Tensor],
    ) -> None:
        for one, was_right, answer, full, other in zip(asked, is_right, said, expected, found, strict=True):
            right = self._is_right(one, answer)
            sums.right += right
            sums.kept += right and was_right
            sums.num_cases += 1
            sums.add(full, other)

    def _is_right(self, asked: Asked, answer: Ids) -> bool:
        text = str(self.tokens.tokenizer.decode(answer, skip_special_tokens=True)).strip()
        return (score_case(asked.case, text) or 0.0) >= 1.0


def blocks(options: argparse.Namespace) -> Iterator[Block]:
    """From the most important on."""
    count = options.questions
    half = count // 2
    prose = sorted({document.text for case in load(options.prose, documents=1) for document in case.documents})
    yield Block("records, 3 to 6", list(records(Similar(), prose, 0, count, 3, 6)), tuple(WAYS))
    asked = list(records(Similar(is_long=True), prose, 1, half, 3, 8))
    yield Block("records of 150 to 250 tokens, 3 to 8", asked, FEWER)
    for language in ("en", "de", "es", "zh"):
        path = options.prose.with_name(f"xquad.{language}.json")
        if path.exists():
            asked = list(paragraphs(path, 2, count if language == "en" else half, 3, 6))
            yield Block(f"prose (XQuAD, {language}), 3 to 6", asked, OF_PROSE)
    for language in ("de", "zh"):
        asked = list(records(Similar(language=language), prose, 3, half, 3, 6))
        yield Block(f"records, 3 to 6, {language}", asked, FEWER)
    chance = Random(4)
    asked = [padded(each, prose, chance, 4_000) for each in records(Similar(), prose, 4, count // 4, 3, 5)]
    yield Block("records in 1,000 tokens of prose, 3 to 5", asked, FEWER)


def measure(options: argparse.Namespace) -> None:
    """Measures a model, block by block; what is done is saved after each."""
    torch.set_float32_matmul_precision("high")
    reader = Reader(options.model, options.device, getattr(torch, options.dtype), batch_tokens=options.batch_tokens)
    study = Study(reader, Tokens(options.model), options.batch)
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    report: dict[str, Any] = {"model": options.name, "device": device, "dtype": options.dtype, "blocks": {}}
    for block in blocks(options):
        if options.only and not any(word in block.name for word in options.only):
            continue
        if options.ways:
            block = replace(block, ways=[name for name in WAYS if name in options.ways])
        start = time.perf_counter()
        report["blocks"][block.name] = study.measure(block)
        report["seconds"] = report.get("seconds", 0) + time.perf_counter() - start
        save(f"companions-{options.name}", report, options.to)
        print(f"{block.name}: {time.perf_counter() - start:.0f} s", flush=True)
        print(table(report["blocks"][block.name]), flush=True)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| companions | right | of full's | divergence | equal greedy tokens | repaired |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        kept = f"{row['right'] / row['of']:.0%} ({row['kept']} the same)" if row["of"] else "-"
        cells = (name, f"{row['right']} of {row['cases']}", kept, f"{row['divergence']:.4f}")
        lines.append(f"| {' | '.join(cells)} | {row['agreement']:.1%} | {row['repaired']:.0%} |")
    return "\n".join(lines)


PLACES = (
    "none",
    "1, the first 0",
    *(f"by place, at most {limit}" for limit in (2, 3, 4)),
    "by place, in pairs",
    "0, 2, 2, 4 and more",
    "by place",
)
"""Ways that differ in the copies that a document has: how much of a trace they reuse."""


def reused(trace: Trace, way: Companions, *, chooses_order: bool) -> float:
    """Share of passage tokens that are read from a copy; a cache without limit."""
    copies: set[tuple[int, int]] = set()
    hits = 0
    for request in trace.requests:
        documents = request.documents
        counts = [way.count(place, len(documents)) for place in range(len(documents))]
        if chooses_order:
            documents = _ordered(documents, counts, copies)
        for block, count in zip(documents, counts, strict=True):
            hits += block.num_tokens if (block.id, count) in copies else 0
            copies.add((block.id, count))
    return hits / sum(request.num_document_tokens for request in trace.requests)


def _ordered(blocks: Sequence[TraceBlock], counts: list[int], copies: set[tuple[int, int]]) -> list[TraceBlock]:
    """The blocks at places where a copy of theirs is known, the longest first; the others in between, as sent."""
    placed: dict[int, int] = {}
    for number in sorted(range(len(blocks)), key=lambda number: -blocks[number].num_tokens):
        known = (place for place, count in enumerate(counts) if (blocks[number].id, count) in copies)
        if (place := next((each for each in known if each not in placed), None)) is not None:
            placed[place] = number
    others = iter(sorted(set(range(len(blocks))) - set(placed.values())))
    return [blocks[placed[place] if place in placed else next(others)] for place in range(len(blocks))]


def report(options: argparse.Namespace) -> None:
    """Puts the results of all models into one page and one plot."""
    text = ["# Companions: what a document has met when it was computed", (__doc__ or "").split("\n\n", 2)[2].strip()]
    found = {}
    for path in sorted(RESULTS.glob("companions-*.json")):
        one = found[path.stem.removeprefix("companions-")] = json.loads(path.read_text())
        text.append(f"# {one['model']} ({one['device']}, {one['dtype']}, commit {one['commit']})")
        for name, rows in one["blocks"].items():
            text += [f"## {name}", table(rows)]
    if options.trace is not None:
        trace = read_trace(options.trace)
        lines = [
            "| companions | copies at 6 places | reused, order as sent | reused, order chosen |",
            "|---|---|---|---|",
        ]
        for name in PLACES:
            way = WAYS[name]
            sent, chosen = (reused(trace, way, chooses_order=chooses) for chooses in (False, True))
            lines.append(f"| {name} | {way.copies(6)} | {sent:.1%} | {chosen:.1%} |")
        text += [f"# Reuse: {trace.name}, {len(trace.requests)} requests, unlimited cache", "\n".join(lines)]
    RESULTS.joinpath("companions.md").write_text("\n\n".join(text) + "\n")
    draw(found, RESULTS / "companions.png")


LINES = {
    "as many as the place, at most": "by place, at most {}",
    "as many for all but the first": "{}, the first 0",
    "as many for all": "{} for all",
}


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Right answers by the number of companions, and by what is repaired; the first block of each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = {name: one for name, one in found.items() if next(iter(one["blocks"].values()))[FULL]["right"]}
    figure = FigureCanvasAgg(Figure(figsize=(11, 4.6 * len(found)), layout="constrained")).figure
    for number, one in enumerate(found.values()):
        title, rows = next(iter(one["blocks"].items()))
        left = figure.add_subplot(len(found), 2, 2 * number + 1)
        right = figure.add_subplot(len(found), 2, 2 * number + 2, sharey=left)
        share = {name: 100 * row["right"] / row["of"] for name, row in rows.items()}
        for label, form in LINES.items():
            points = [(0, share["none"])]
            points += [(each, share[form.format(each)]) for each in (1, 2, 3, 4) if form.format(each) in share]
            left.plot(*zip(*points, strict=True), "o-", label=label)
        left.axhline(share[OTHER_ORDER], color="gray", ls="--", label="full attention, another order")
        left.axhline(100, color="black", lw=0.8, label="full attention")
        left.set(title=f"{one['model']}: {title}", xlabel="companions", ylabel="right answers, % of full attention's")
        left.legend(fontsize=8, frameon=False)
        for name, row in rows.items():
            if name not in (FULL, OTHER_ORDER):
                right.plot(100 * row["repaired"], share[name], "o", color="C3" if row["repaired"] else "C0", ms=4)
                if row["repaired"] or name in ("none", "by place", "lead-in", "3 for all", "3, the first 0"):
                    place = (100 * row["repaired"], share[name])
                    right.annotate(name, place, (3, 2), textcoords="offset points", fontsize=6)
        right.set(title="with tokens computed again", xlabel="tokens of documents computed again, %")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure", help="one model")
    one.add_argument("model", type=Path, help="a folder, or a GGUF file")
    one.add_argument("--name", required=True)
    one.add_argument("--device", default="cpu")
    one.add_argument("--dtype", default="float32")
    one.add_argument("--questions", type=int, default=200)
    one.add_argument("--prose", type=Path, required=True, help="XQuAD, in English; other languages beside it")
    one.add_argument("--only", nargs="*", help="parts of the names of blocks")
    one.add_argument("--ways", nargs="*", help="names of ways")
    one.add_argument("--batch", type=int, default=40, help="questions at once")
    one.add_argument("--batch-tokens", type=int, default=2**17, help="tokens of documents at once")
    one.add_argument("--to", type=Path, default=RESULTS)
    one.set_defaults(run=measure)
    all_ = commands.add_parser("report", help="one page and one plot of all results")
    all_.add_argument("--trace", type=Path, help="RAGPulse: 0_trace.jsonl, the other files beside it")
    all_.set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
