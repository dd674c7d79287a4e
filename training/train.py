"""The training loop: a constant rate after a short warm-up, falling to zero at the end; resumable at any time."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from kvmosaic.lab.eval.text.documents import Example, Recipe, TextSource
from kvmosaic.lab.eval.text.recipes import (
    ChainRecipe,
    OrderRecipe,
    StoryRecipe,
    chain_example,
    order_example,
    story_example,
)
from training.align import Aligned
from training.batches import Packer, Reading, Shape, Writer
from training.curriculum import STAGES, draw_row, stage_at
from training.evaluate import load_reader
from training.grow import convert, grow
from training.layout import STRATEGIES, Strategy
from training.measure import measure
from training.model import SHAPES, Batch, Reader
from training.optimizers import Optimizers, resume, save
from training.pointers import WEIGHT as POINTER_WEIGHT
from training.start import initialise
from training.tokenizer import train_tokenizer

PROGRESS_SHAPES = (Shape(10, 384, 160),)
PROGRESS: dict[str, Callable[[TextSource], Example]] = {
    "one document": lambda source: source.example(Recipe((1, 1), sentences=(1, 3), pronouns=0, joined=0, fillers=0)),
    "3-6 documents": lambda source: source.example(Recipe(documents=(3, 6))),
    "two hops": lambda source: chain_example(source, ChainRecipe(one_hop=0, questions=6)),
    "stories": lambda source: story_example(source, StoryRecipe(questions=6)),
    "orders": lambda source: order_example(source, OrderRecipe(questions=6)),
}


class Data:
    """An endless stream of batches that follows the curriculum."""

    def __init__(self, options: argparse.Namespace, step: int, tokenizer: Tokenizer) -> None:
        self.random = Random(f"reading-{options.seed}-{step}")
        self.source = TextSource(options.seed + 1000 * step)
        self.writer = Writer(tokenizer, self.random)
        self.packer = Packer(tokenizer, self.random, options.text_weight)
        self.stages = STAGES[options.curriculum]
        self.ways: tuple[Strategy, ...] = STRATEGIES if options.curriculum == "reader" else ("causal",)
        self.step = step

    def __iter__(self) -> Iterator[Batch]:
        while True:
            row = draw_row(self.random, self.source, self.writer, stage_at(self.step, self.stages), self.ways)
            for batch in self.packer.add(row):
                yield batch
                self.step += 1


def rate_factor(step: int, warmup: int, steps: int, decay: int) -> float:
    """The factor on the rates: up in `warmup` steps, level, and down to 2% in the last `decay` steps."""
    return min(1.0, (step + 1) / warmup) * min(1.0, max(0.02, (steps - step) / decay))


def show_progress(answers: Callable[[Batch], Tensor], tokenizer: Tokenizer, ways: tuple[Strategy, ...]) -> None:
    """Prints the accuracy on a few held-out prompts, and some wrong answers."""
    for name, draw in PROGRESS.items():
        scores = {way: measure(answers, tokenizer, draw, Reading(way), 120, shapes=PROGRESS_SHAPES) for way in ways}
        print(f"  {name}:", *(f"{way} {score.accuracy:.3f}" for way, score in scores.items()))
        print(*(f"    {wrong}" for wrong in scores["causal"].wrong[:2]), sep="\n", flush=True)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="checkpoint folder; training resumes from it")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; trained when missing")
    parser.add_argument("--curriculum", choices=sorted(STAGES), default="reader")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--grow", type=Path, help="model folder with fewer layers to start from")
    parser.add_argument("--convert", type=Path, help="model folder of a Llama that a hybrid starts from")
    parser.add_argument("--align", type=int, default=300, help="steps in which its layers with a state learn alone")
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--decay", type=int, default=3000, help="steps of falling rate at the end")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--matrix-rate", type=float, default=0.003)
    parser.add_argument("--other-rate", type=float, default=0.001)
    parser.add_argument("--text-weight", type=float, default=0.1, help="weight of tokens outside the answers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=500)
    return parser.parse_args()


def main() -> None:
    """Trains until the last step, saving and measuring on the way."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.tokenizer or options.folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(options.seed).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    model = Reader(SHAPES[options.shape])
    initialise(model)
    if options.grow:
        grow(model, options.grow)
    aligned = None
    if options.convert:
        convert(model, options.convert)
        aligned = torch.compile(Aligned(model, load_reader(options.convert, model.dtype)[0]), dynamic=False)
    optimizers = Optimizers(model, options.matrix_rate, options.other_rate)
    record = resume(options.folder, model, optimizers)
    loss_of = torch.compile(model, dynamic=False)
    answers_of = torch.compile(model.answers, dynamic=False)
    stream = Data(options, int(record["step"]), tokenizer)
    model.is_causal = stream.ways == ("causal",)
    data = iter(stream)
    shown, shown_tokens, losses = time.perf_counter(), record["tokens"], 0.0
    for step in range(int(record["step"]), options.steps):
        started = time.perf_counter()
        batch = next(data)
        if aligned is not None and step < options.align:
            loss = aligned(batch)
            loss.backward()
        else:
            loss, pointing = loss_of(batch)
            (loss + POINTER_WEIGHT * pointing).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(rate_factor(step, options.warmup, options.steps, options.decay))
        losses += loss.item()
        record["tokens"] += batch.tokens.numel()
        record["seconds"] += time.perf_counter() - started
        record["step"] = step + 1
        if (step + 1) % 50 == 0:
            now = time.perf_counter()
            speed = (record["tokens"] - shown_tokens) / (now - shown)
            print(
                f"step {step + 1} loss {losses / 50:.3f} tokens {record['tokens'] / 1e6:.2f}M {speed:.0f}/s", flush=True
            )
            shown, shown_tokens, losses = now, record["tokens"], 0.0
        if (step + 1) % options.evaluate_every == 0 or step + 1 == options.steps:
            save(options.folder, model, optimizers, record)
            show_progress(answers_of, tokenizer, stream.ways)


if __name__ == "__main__":
    main()
