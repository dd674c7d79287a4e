"""Learned contexts: embeddings in place of the paragraph that documents are computed after.

    python benchmarks/learned_contexts.py MODEL --name smollm2 --xquad xquad.en.json --minutes 60

They start as the package's paragraph, and are trained without labels, so that documents computed after them and read at
their places give the answers of full attention (KV Packet, arXiv 2604.13226). Articles of the questions are held out.
Divergence in nats per token of full attention's answer; results/learned-contexts-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from apart import Composed, Ids, Reader, Reading
from companions import WAYS, Asked, Tokens
from facts import RESULTS, save
from log_probabilities import Nearness
from torch import Tensor
from transformers import DynamicCache

from kvmosaic.lab.eval.case import Case
from kvmosaic.prompt import Document
from kvmosaic.prompt.companions import paragraph_for

SYSTEM = "Answer the question from the documents."
HELD_OUT, DOCUMENTS, QUESTIONS, ANSWER_TOKENS = 8, 4, 3, 24
SHOWN = ("none", "lead-in, the first 0", "3, the first 0")


def lesson(article: Any, others: list[str], chance: Random) -> list[Asked]:
    """Questions about some paragraphs of one article, with other articles' paragraphs as companions."""
    chosen = chance.sample(article["paragraphs"], DOCUMENTS)
    documents = tuple(Document(each["context"]) for each in chosen)
    pools = {"kind": tuple(chance.sample(others, 3)), "lead-in": (paragraph_for(each.text for each in documents),)}
    asked = [chance.choice(each["qas"])["question"] for each in chance.sample(chosen, QUESTIONS)]
    return [Asked(Case(each, "xquad", each, ("?",), documents, SYSTEM), pools) for each in asked]


class Learner:
    """Embeddings [n, width] after the system text, and what documents become after them."""

    def __init__(self, reader: Reader, tokens: Tokens, ids: Ids) -> None:
        self.reader, self.tokens, self.model = reader, tokens, reader.model.model
        self.soft = self._embedded(ids).float().requires_grad_()

    def _embedded(self, ids: Ids) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(torch.tensor(ids))
        return embedded

    def taught(self, asked: list[Asked]) -> tuple[list[Ids], list[Tensor]]:
        """Answers of full attention, and its log probabilities."""
        readings = [self.tokens.reading(each, None) for each in asked]
        composed = self.reader.compose(readings)
        answers = self.reader.answers(composed, readings, ANSWER_TOKENS)
        return answers, self.reader.distributions(composed, readings, answers)

    def distributions(self, asked: list[Asked], answers: list[Ids]) -> list[Tensor]:
        """Log probabilities where all documents but the first were computed after the embeddings."""
        readings = [self.tokens.reading(each, WAYS["none"]) for each in asked]
        composed = self._composed(readings[0]).rows([0] * len(readings))
        return self.reader.distributions(composed, readings, answers)

    def _composed(self, reading: Reading) -> Composed:
        first = self.reader.compose([replace(reading, documents=reading.documents[:1])])
        rest = [each.ids for each in reading.documents[1:]]
        start = torch.cat([self._embedded(reading.system).float(), self.soft])[None].to(self.reader.model.dtype)
        prefix = DynamicCache()
        self.model(inputs_embeds=start, past_key_values=prefix, use_cache=True)
        cache = DynamicCache()
        for number, layer in enumerate(prefix.layers):
            wide = (len(rest), -1, -1, -1)
            cache.update(layer.keys.expand(wide), layer.values.expand(wide), number)
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in rest], batch_first=True)
        self.model(input_ids=padded, past_key_values=cache, use_cache=True)
        states = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
        place, parts = int(first.starts), [first.states[:, :, 0].clone()]
        for number, ids in enumerate(rest):
            own = states[:, :, number, :, start.shape[1] : start.shape[1] + len(ids)]
            parts.append(self.reader.moved(own, place - start.shape[1]))
            place += len(ids)
        whole = torch.cat(parts, dim=-2)[:, :, None]
        return Composed(whole, torch.ones(1, place, dtype=torch.bool), torch.tensor([place]))

    def divergence(self, lessons: list[list[Asked]]) -> dict[str, float]:
        """Of the embeddings, of ways of `benchmarks/companions.py`, and of another order."""
        sums = {name: Nearness() for name in ("learned", *SHOWN, "the first document last")}
        for asked in lessons:
            answers, wanted = self.taught(asked)
            with torch.no_grad():
                found = {"learned": self.distributions(asked, answers)}
            turned = [replace(each, case=each.case.turned()) for each in asked]
            others = {name: [self.tokens.reading(each, WAYS[name]) for each in asked] for name in SHOWN}
            others["the first document last"] = [self.tokens.reading(each, None) for each in turned]
            for name, readings in others.items():
                found[name] = self.reader.distributions(self.reader.compose(readings), readings, answers)
            for name, rows in found.items():
                for expected, row in zip(wanted, rows, strict=True):
                    sums[name].add(expected, row)
            self.reader.forget()
        return {name: each.row()["divergence"] for name, each in sums.items()}

    def learn(self, asked: list[Asked]) -> float:
        """Gradients of one lesson; returns its divergence."""
        answers, wanted = self.taught(asked)
        found = self.distributions(asked, answers)
        self.reader.forget()
        expected, rows = torch.cat(wanted).clone(), torch.cat(found)
        loss = (expected.exp() * (expected - rows)).sum(-1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


def main() -> None:
    """Trains for so many minutes of processor time, and measures now and then."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=Path)
    options.add_argument("--name", required=True)
    options.add_argument("--xquad", type=Path, required=True)
    options.add_argument("--minutes", type=float, default=60)
    options.add_argument("--tokens", type=int, default=64, help="of the paragraph, that the embeddings start as")
    options.add_argument("--rate", type=float, default=0.03, help="of a step, by the size of embeddings")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    articles = json.loads(given.xquad.read_text(encoding="utf-8"))["data"]
    reader = Reader(given.model, "cpu", getattr(torch, given.dtype), batch_tokens=2048)
    tokens = Tokens(given.model)
    learner = Learner(reader, tokens, tokens.ids(paragraph_for(()) + "\n\n")[-given.tokens :])
    size = float(learner.soft.detach().square().mean().sqrt())
    optimizer = torch.optim.Adam([learner.soft], lr=given.rate * size, betas=(0.9, 0.99))
    learned, held = articles[:-HELD_OUT], articles[-HELD_OUT:]
    others = [each["context"] for article in learned for each in article["paragraphs"]]
    lessons = [lesson(article, others, Random(f"held {number}")) for number, article in enumerate(held)]
    begin, step, history, mean = time.process_time(), 0, list[dict[str, float]](), 0.0
    while (minutes := (time.process_time() - begin) / 60) < given.minutes or not history[-1]["is_last"]:
        is_last = minutes >= given.minutes
        if step % 40 == 0 or is_last:
            row = {"step": step, "minutes": minutes, "of lessons": mean, "is_last": is_last}
            history.append(row | learner.divergence(lessons))
            print({name: round(value, 4) for name, value in history[-1].items()}, flush=True)
            about = {"model": given.model.name, "dtype": given.dtype, "threads": given.threads, "tokens": given.tokens}
            save(f"learned-contexts-{given.name}", about | {"history": history})
            if is_last:
                break
        for group in optimizer.param_groups:
            group["lr"] = given.rate * size * (0.05 + 0.475 * (1 + math.cos(math.pi * minutes / given.minutes)))
        chance = Random(f"{step}")
        loss = learner.learn(lesson(chance.choice(learned), others, chance))
        optimizer.step()
        optimizer.zero_grad()
        step, mean = step + 1, loss if not step else 0.95 * mean + 0.05 * loss
    print(f"saved to {RESULTS}")


if __name__ == "__main__":
    main()
