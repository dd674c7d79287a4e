"""Measures a checkpoint on held-out names and documents and writes the numbers as JSON."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvmosaic.eval.text.documents import Recipe, TextSource
from training.batches import Reading
from training.layout import STRATEGIES
from training.measure import Score, measure
from training.model import Reader, ReaderConfig

MAIN = Recipe(documents=(3, 6))


def load_reader(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Reader, Tokenizer]:
    """The training model with the weights of a model folder."""
    model = Reader(ReaderConfig(), dtype)
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def conditions() -> dict[str, tuple[Recipe, bool, bool]]:
    """What is measured: name -> recipe, chat form or raw form, whether documents see the system text."""
    plain = replace(MAIN, pronouns=0.0, joined=0.0)
    return {
        "3-6 documents": (MAIN, True, True),
        "3-6 documents, raw form": (MAIN, False, True),
        "3-6 documents, full names only": (plain, True, True),
        "3-6 documents, all of one kind": (replace(MAIN, same_kind=1.0), True, True),
        "3-6 documents, chunk_context none": (MAIN, True, False),
        **{f"{count} documents": (replace(MAIN, documents=(count, count)), True, True) for count in (1, 2, 4, 8)},
    }


def evaluate(model: Reader, tokenizer: Tokenizer, questions: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measures all conditions and prints a line for each."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, (recipe, chat, sees_system) in conditions().items():
        row: dict[str, Score] = {}
        for strategy in STRATEGIES:
            if not sees_system and strategy == "causal":
                continue
            reading = Reading(strategy, sees_system=sees_system, chat=chat)
            row[strategy] = measure(
                model.answers, tokenizer, partial(TextSource.example, recipe=recipe), reading, questions, seed=7
            )
        results[name] = {
            strategy: {"exact_match": round(score.accuracy, 4), "right": score.right, "questions": score.asked}
            for strategy, score in row.items()
        }
        print(f"{name:36}", *(f"{strategy} {score.accuracy:.4f}" for strategy, score in row.items()), flush=True)
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with model.safetensors and tokenizer.json")
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    parser.add_argument("--questions", type=int, default=1000, help="at least this many per strategy and condition")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    model, tokenizer = load_reader(options.folder, getattr(torch, options.dtype))
    results = evaluate(model, tokenizer, options.questions)
    if options.output:
        report = {
            "measure": "exact match of greedy answers on held-out names and documents",
            "reader": f"training model (training/model.py) with the shipped weights, {options.dtype}",
            "results": results,
        }
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
