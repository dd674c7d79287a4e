"""What an adapter forgets: the model with and without it, on texts and questions that have no documents.

    python scripts/fetch_xquad.py data
    python benchmarks/forgetting.py MODEL --adapter adapter --data data/xquad.en.json data/xquad.de.json --name smollm2

kvmosaic serves ordinary prompts by the base model, to the bit. This asks what would change where the adapter is merged
into the weights (`--merge-adapter`), or served by an engine that applies it to all prompts:

    texts       loss of plain texts, in nats per token: the documents of each file, and Python source
    questions   the questions of each file, asked without documents: how far the adapted model is from the base model
                over the tokens of the base model's own greedy answers

Forwards are dense ones of packed rows (`kvmosaic.lab.adapt.distillation`). Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from facts import save
from log_probabilities import Nearness
from rich.progress import track
from torch import Tensor

import kvmosaic
from kvmosaic import LLM, ChunkCacheConfig, SamplingParams
from kvmosaic.assembly import adapter_folders
from kvmosaic.lab.adapt.distillation import forward, ordinary_rows
from kvmosaic.lab.eval.loaders import load
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.prompt import Prompt, Segment, SegmentKind

MAX_TEXT_TOKENS = 512


@dataclass
class Sums(Nearness):
    """Sums over tokens, each of which both models predict, with the losses of both."""

    base: float = 0.0
    adapted: float = 0.0

    def add_losses(self, base: Tensor, adapted: Tensor, targets: Tensor) -> None:
        """Adds the losses of the tokens [R] that follow, by log-probabilities [R, V] of both."""
        rows = torch.arange(len(targets))
        self.base -= float(base[rows, targets].sum())
        self.adapted -= float(adapted[rows, targets].sum())

    def row(self) -> dict[str, float]:
        """Means."""
        losses = {"base": self.base / self.num_tokens, "adapted": self.adapted / self.num_tokens}
        return {**losses, **super().row(), "tokens": self.num_tokens}


def compared(model: LoadedModel, token_ids: Sequence[int], first: int, adapter: str, sums: Sums) -> None:
    """Adds what both models say of the tokens from `first` on."""
    packed = ordinary_rows(Prompt((Segment(SegmentKind.QUESTION, tuple(token_ids)),)), [token_ids])
    rows = torch.arange(first - 1, len(token_ids) - 1)
    with torch.no_grad():
        base, adapted = (forward(model, packed, rows, each).float().log_softmax(-1) for each in ("", adapter))
    sums.add(base, adapted)
    sums.add_losses(base, adapted, packed.token_ids[first:])


def texts_of(model: LoadedModel, texts: list[str], adapter: str, name: str) -> Sums:
    """Compares both on plain texts."""
    sums = Sums()
    for text in track(texts, f"{name}, texts"):
        token_ids = model.tokenizer(text, truncation=True, max_length=MAX_TEXT_TOKENS)["input_ids"]
        if len(token_ids) > 1:
            compared(model, token_ids, 1, adapter, sums)
    return sums


def questions_of(model: LoadedModel, llm: LLM, questions: list[str], adapter: str, name: str, tokens: int) -> Sums:
    """Compares both on the base model's own greedy answers to questions without documents."""
    sums = Sums()
    params = SamplingParams(temperature=0, max_tokens=tokens)
    for question in track(questions, f"{name}, questions"):
        (output,) = llm.chat([[{"role": "user", "content": question}]], params)
        asked, answer = output.prompt_token_ids, output.outputs[0].token_ids
        compared(model, [*asked, *answer], len(asked), adapter, sums)
    return sums


def table(rows: dict[str, dict[str, float]]) -> str:
    """In Markdown."""
    lines = ["| without documents | tokens | loss, base | loss, adapted | divergence | equal greedy tokens |"]
    lines += ["|---" * lines[0].count(" | ") + "|---|"]
    lines += [
        f"| {name} | {row['tokens']} | {row['base']:.3f} | {row['adapted']:.3f} | {row['divergence']:.4f} | "
        f"{row['agreement']:.1%} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--adapter", required=True, metavar="FOLDER")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="questions with documents")
    parser.add_argument("--questions", type=int, default=24, help="of each file")
    parser.add_argument("--texts", type=int, default=40, help="of each file, and of Python source")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="model", help="of the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    adapters = adapter_folders([f"adapted={options.adapter}"])
    model = load_model(options.model, dtype="float32", device="cpu", prepack="never", adapters=adapters)
    adapter = model.adapters["adapted"].digest
    rows: dict[str, dict[str, float]] = {}
    with LLM(model, profile=False, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB")) as llm:
        for path in options.data:
            cases = load(path, None, None, documents=1, seed=0)
            chance = Random(path.name)
            texts = sorted({document.text for case in cases for document in case.documents})
            texts = chance.sample(texts, min(options.texts, len(texts)))
            asked = sorted({case.question for case in cases})
            asked = chance.sample(asked, min(options.questions, len(asked)))
            rows[f"texts of {path.name}"] = texts_of(model, texts, adapter, path.name).row()
            found = questions_of(model, llm, asked, adapter, path.name, options.answer_tokens)
            rows[f"questions of {path.name}"] = found.row()
        files = sorted(Path(kvmosaic.__file__).parent.rglob("*.py"))
        source = [file.read_text() for file in Random(0).sample(files, min(options.texts, len(files)))]
        rows["Python source"] = texts_of(model, source, adapter, "Python source").row()
    print(f"\n{table(rows)}")
    report: dict[str, Any] = {"model": Path(options.model).name, "threads": options.threads, "adapter": adapter}
    path = save(f"forgetting-{options.name}", report | {"rows": rows})
    path.with_suffix(".md").write_text(f"# What the adapter forgets: {report['model']}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
