"""Batches: examples written as segments of tokens, packed into rows of a few fixed shapes."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer

from kvmosaic.lab.eval.text.documents import Example
from training.layout import Strategy, place
from training.model import PAD_SEGMENT, Batch
from training.pointers import find_source, make_pointers
from training.tokenizer import ASSISTANT, BEGIN, DOCUMENT, END, PAD, SYSTEM, USER, token_id


@dataclass(frozen=True)
class Shape:
    """Rows, context tokens and question tokens of a batch."""

    rows: int
    context: int
    questions: int

    @property
    def chosen(self) -> int:
        """How many tokens of the batch have their next token predicted."""
        return int(self.rows * (self.context + self.questions) * 0.25)


BRIDGED_WEIGHT = 2.0  # of answers over two hops, beside 1 for the others
SHAPES = (Shape(24, 96, 160), Shape(14, 192, 224), Shape(9, 320, 224), Shape(6, 512, 224))


@dataclass(frozen=True)
class Reading:
    """How one prompt is written and read."""

    strategy: Strategy
    sees_system: bool = True
    chat: bool = True
    edges: bool = False  # whether segments of the raw form may carry white space at their edges
    gap: int = 0  # up to how many extra positions lie between the segments
    cut: int = 0  # the documents are one long text, cut after every so many tokens; 0 leaves them apart
    turns: bool = False  # whether every second question follows an earlier question and its answer


@dataclass
class Row:
    """One prompt as tokens: the context, and the questions as blocks."""

    tokens: list[int]
    local: list[int]
    moved: list[int]
    segments: list[int]
    blocks: list[tuple[list[int], int]]  # tokens of question + answer, and how many of them are the question
    question: int
    reading: Reading
    asked: list[int]  # for each block, the index of its question in the example
    sources: list[list[int]]  # for each block, the context index that each answer token is copied from, or -1
    bridges: list[list[int]]  # the same for the name that leads to the answer: its last token
    learn_text: bool = True  # whether the tokens outside the answers can be predicted at all


class Writer:
    """Writes examples as rows. The tokens of a segment depend on that segment alone."""

    def __init__(self, tokenizer: Tokenizer, random: Random) -> None:
        self.tokenizer = tokenizer
        self.random = random
        self.end = token_id(tokenizer, END)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, alone."""
        return [one.ids for one in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def texts(self, example: Example, reading: Reading) -> tuple[str, list[str], list[str]]:
        """The texts of the system segment, the documents and the questions."""
        if reading.chat:
            system = f"{BEGIN}{SYSTEM}{example.system}\n" if example.system else BEGIN
            documents = [
                f"{'' if index and reading.cut else DOCUMENT}{f'{d.title}{chr(10)}' if d.title else ''}{d.text}\n"
                for index, d in enumerate(example.documents)
            ]
            return system, documents, [f"{USER}{q.text}\n{ASSISTANT}" for q in example.questions]
        documents = [f"{d.title}\n{d.text}" if d.title else d.text for d in example.documents]
        if reading.cut:
            documents = [f"{text}\n" for text in documents]
        system, questions = example.system or "", [q.text for q in example.questions]
        if reading.edges:
            style = self.random.random()
            before, after = (
                ("", "\n")
                if style < 0.5
                else ("\n", "\n")
                if style < 0.7
                else ("\n", "")
                if style < 0.85
                else (" ", " ")
            )
            system = system and system + after
            documents = [before + text + after for text in documents]
            questions = [before + text for text in questions]
        return BEGIN + system, documents, questions

    def row(self, example: Example, reading: Reading, question_tokens: int) -> Row:
        """The example as a row; questions that do not fit into `question_tokens` are left out."""
        system, documents, questions = self.texts(example, reading)
        encoded = self.encode([system, *documents, *questions, *(" " + q.answer for q in example.questions)])
        context = encoded[: 1 + len(documents)]
        asked = encoded[len(context) : len(context) + len(questions)]
        answers = encoded[len(context) + len(questions) :]
        starts = [sum(len(one) for one in context[:index]) for index in range(len(context))]
        whole = list(context)
        if reading.cut:
            text = [token for document in context[1:] for token in document]
            context = [context[0], *(text[i : i + reading.cut] for i in range(0, len(text), reading.cut))]
        gaps: list[int] = []
        if reading.gap:
            gaps = [
                self.random.randint(0, reading.gap) if self.random.random() < 0.5 else 0
                for _ in range(len(documents) + 1)
            ]
            scale = min(1.0, 2 * reading.gap / max(1, sum(gaps)))
            gaps = [int(gap * scale) for gap in gaps]
        positions = place(
            len(context[0]), [len(one) for one in context[1:]], reading.strategy, reading.sees_system, gaps
        )
        segments = [index for index, segment in enumerate(context) for _ in segment]
        blocks: list[tuple[list[int], int]] = []
        sources: list[list[int]] = []
        bridges: list[list[int]] = []
        kept: list[int] = []
        used = 0
        earlier: list[int] = []
        for index, (question, answer) in enumerate(zip(asked, answers, strict=True)):
            question = [*earlier, *question]
            tokens = [*question, *answer, self.end]
            earlier = tokens if reading.turns and not earlier else []
            if used + len(tokens) <= question_tokens:
                used += len(tokens)
                kept.append(index)
                blocks.append((tokens, len(question)))
                asking = example.questions[index]
                number = asking.document + 1
                sources.append(find_source(whole[number], answer, starts[number]) if number else [-1] * len(answer))
                bridges.append([-1] * len(answer))
                if asking.bridge is not None:
                    [name] = self.encode([f" {asking.bridge.text}"])
                    number = asking.bridge.document + 1
                    bridges[-1] = [find_source(whole[number], name, starts[number])[-1]] * len(answer)
        flat = [token for segment in context for token in segment]
        return Row(
            flat,
            positions.local,
            positions.moved,
            segments,
            blocks,
            positions.question,
            reading,
            kept,
            sources,
            bridges,
        )


def collate(
    rows: list[Row], shape: Shape, random: Random, pad: int, text_weight: float
) -> tuple[Batch, list[tuple[int, int, int]]]:
    """A batch, and for each question block (row, first index, number) of its answers among the chosen tokens.

    The chosen tokens are all answers, then randomly drawn other tokens until the shape's number is reached.
    """
    length = shape.context + shape.questions
    tokens = torch.full((shape.rows, length), pad)
    local, moved = torch.zeros_like(tokens), torch.zeros_like(tokens)
    segments = torch.full_like(tokens, PAD_SEGMENT)
    chosen: list[int] = []
    targets: list[int] = []
    spans: list[tuple[int, int, int]] = []
    others: list[tuple[int, int]] = []
    pointed: list[tuple[int, int, float]] = []
    bridged: list[tuple[int, int, float]] = []
    heavy: set[int] = set()
    for index, row in enumerate(rows):
        base, count = index * length, len(row.tokens)
        tokens[index, :count] = torch.tensor(row.tokens)
        local[index, :count] = torch.tensor(row.local)
        moved[index, :count] = torch.tensor(row.moved)
        segments[index, :count] = torch.tensor(row.segments)
        others += (
            []
            if not row.learn_text
            else [
                (base + i, row.tokens[i + 1])
                for i in range(count - 1)
                if row.segments[i] == row.segments[i + 1] and row.segments[i]
            ]
        )
        cursor = shape.context
        for number, (block, asked) in enumerate(row.blocks, 1):
            stop = cursor + len(block)
            tokens[index, cursor:stop] = torch.tensor(block)
            local[index, cursor:stop] = torch.arange(row.question, row.question + len(block))
            segments[index, cursor:stop] = number
            spans.append((index, len(chosen), len(block) - asked))
            places = range(base + cursor + asked - 1, base + stop - 1)
            if row.sources:
                bridges, sources = row.bridges[number - 1], row.sources[number - 1]
                has_bridge = any(column >= 0 for column in bridges)
                weight = BRIDGED_WEIGHT if has_bridge else 1.0
                pointed += [(p, column, weight) for p, column in zip(places, sources, strict=False) if column >= 0]
                bridged += [(p, column, 1.0) for p, column in zip(places, bridges, strict=False) if column >= 0]
                heavy |= set(range(len(chosen), len(chosen) + len(places))) if has_bridge else set()
            chosen += places
            targets += block[asked:]
            others += [(base + cursor + i, block[i + 1]) for i in range(asked - 1)] if row.learn_text else []
            cursor = stop
    moved[:, shape.context :] = local[:, shape.context :]
    answers = len(chosen)
    random.shuffle(others)
    room = shape.chosen - answers
    chosen += [place for place, _ in others[:room]]
    targets += [target for _, target in others[:room]]
    weights = [BRIDGED_WEIGHT if index in heavy else 1.0 for index in range(answers)] + [text_weight] * (
        len(chosen) - answers
    )
    missing = shape.chosen - len(chosen)
    return (
        Batch(
            tokens,
            local,
            moved,
            segments,
            torch.tensor([row.reading.strategy == "causal" for row in rows] + [False] * (shape.rows - len(rows))),
            torch.tensor([row.reading.sees_system for row in rows] + [False] * (shape.rows - len(rows))),
            torch.tensor(chosen + [0] * missing),
            torch.tensor(targets + [0] * missing),
            torch.tensor(weights + [0.0] * missing),
            shape.context,
            make_pointers(pointed, shape.rows, shape.context),
            make_pointers(bridged, shape.rows, shape.context),
        ),
        spans,
    )


class Packer:
    """Collects rows in buckets and gives a batch whenever a bucket is full."""

    def __init__(self, tokenizer: Tokenizer, random: Random, text_weight: float) -> None:
        self.random = random
        self.pad = token_id(tokenizer, PAD)
        self.text_weight = text_weight
        self.buckets: dict[Shape, list[Row]] = {shape: [] for shape in SHAPES}

    def add(self, row: Row) -> Iterator[Batch]:
        """Puts a row into the smallest bucket that holds its context; a row too long for all is dropped."""
        for shape, bucket in self.buckets.items():
            if len(row.tokens) <= shape.context:
                while sum(len(block) for block, _ in row.blocks) > shape.questions:
                    row.blocks.pop()
                bucket.append(row)
                if len(bucket) == shape.rows:
                    self.buckets[shape] = []
                    yield collate(bucket, shape, self.random, self.pad, self.text_weight)[0]
                return
