"""Measures a checkpoint on held-out names and documents and writes the numbers as JSON."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvmosaic.lab.eval.text.documents import Example, Recipe, TextSource
from kvmosaic.lab.eval.text.recipes import (
    ChainRecipe,
    OrderRecipe,
    StoryRecipe,
    chain_example,
    order_example,
    story_example,
)
from training.batches import Reading
from training.layout import STRATEGIES, Strategy
from training.measure import Score, measure
from training.model import FIELDS, Reader, ReaderConfig

Draw = Callable[[TextSource], Example]
MAIN = Recipe(documents=(3, 6))


def load_reader(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Reader, Tokenizer]:
    """The training model with the weights of a model folder."""
    config = json.loads((folder / "config.json").read_text())
    shape = {name: config[key] for name, key in FIELDS.items() if key in config}
    delta_layers = tuple(i for i, kind in enumerate(config.get("layer_types", ())) if kind == "linear_attention")
    model = Reader(ReaderConfig(**shape, delta_layers=delta_layers), dtype)
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _plain(recipe: Recipe) -> Draw:
    return lambda source: source.example(recipe)


def conditions() -> dict[str, tuple[Draw, Reading]]:
    """What is measured: name -> what draws prompts, and how they are written; the strategy is set for each."""
    full_names = replace(MAIN, pronouns=0.0, joined=0.0)
    chat = Reading("causal")
    return {
        "3-6 documents": (_plain(MAIN), chat),
        "3-6 documents, raw form": (_plain(MAIN), replace(chat, chat=False)),
        "3-6 documents, full names only": (_plain(full_names), chat),
        "3-6 documents, all of one kind": (_plain(replace(MAIN, same_kind=1.0)), chat),
        "3-6 documents, chunk_context none": (_plain(MAIN), replace(chat, sees_system=False)),
        **{f"{count} documents": (_plain(replace(MAIN, documents=(count, count))), chat) for count in (1, 2, 4, 8)},
        "12 short documents": (_plain(replace(MAIN, documents=(12, 12), sentences=(1, 2))), chat),
        "two hops": (lambda source: chain_example(source, ChainRecipe(one_hop=0.0)), chat),
        "pieces of stories": (lambda source: story_example(source, StoryRecipe()), chat),
        "first and last of 2-3": (lambda source: order_example(source, OrderRecipe()), chat),
        "one text, cut every 48 tokens": (_plain(MAIN), replace(chat, cut=48)),
    }


def evaluate(
    model: Reader, tokenizer: Tokenizer, questions: int, ways: Sequence[Strategy]
) -> dict[str, dict[str, dict[str, float]]]:
    """Measures all conditions and prints a line for each."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, (draw, reading) in conditions().items():
        row: dict[str, Score] = {}
        for way in ways:
            if not reading.sees_system and way == "causal":
                continue
            row[way] = measure(model.answers, tokenizer, draw, replace(reading, strategy=way), questions, seed=7)
        if row:
            results[name] = {
                way: {"exact_match": round(score.accuracy, 4), "right": score.right, "questions": score.asked}
                for way, score in row.items()
            }
            print(f"{name:36}", *(f"{way} {score.accuracy:.4f}" for way, score in row.items()), flush=True)
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with model.safetensors and tokenizer.json")
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    parser.add_argument("--ways", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--questions", type=int, default=1000, help="at least this many per strategy and condition")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    model, tokenizer = load_reader(options.folder, getattr(torch, options.dtype))
    results = evaluate(model, tokenizer, options.questions, options.ways)
    if options.output:
        report = {
            "measure": "exact match of greedy answers on held-out names and documents",
            "reader": f"training model (training/model.py) with the shipped weights, {options.dtype}",
            "results": results,
        }
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
