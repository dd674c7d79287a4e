"""What a composed prompt means, written down once more with transformers alone: its model, its cache, and our reading
of the contract. No layout, plan, rotation or attention of ours is used.

    system     causal from position 0
    chunk i    computed right behind the system text (it sees it), or from position 0 (it sees nothing)
    question   sees all of them at their places in the prompt: keys of chunks that are moved are turned by hand
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

KeysAndValues = list[tuple[Tensor, Tensor]]
"""For each layer: [1, heads, tokens, head size], keys turned as the model turned them."""


@dataclass(frozen=True)
class Asked:
    """Token ids of a composed prompt, and how it is composed."""

    system: Sequence[int]
    chunks: Sequence[Sequence[int]]
    question: Sequence[int]
    strategy: Literal["shared", "sequential"]
    context: Literal["system", "none"]

    @property
    def places(self) -> list[int]:
        """The position of each chunk's first token in the prompt."""
        start = len(self.system)
        if self.strategy == "shared":
            return [start for _ in self.chunks]
        return list(accumulate((len(chunk) for chunk in self.chunks[:-1]), initial=start))

    @property
    def question_place(self) -> int:
        """The position of the question's first token."""
        return max(place + len(chunk) for place, chunk in zip(self.places, self.chunks, strict=True))


class Oracle:
    """Logits of a model of transformers over a composed prompt."""

    def __init__(self, module: Any, asked: Asked) -> None:
        self.module = module
        self.asked = asked
        self.parts: list[KeysAndValues] = []
        with torch.inference_mode():
            system = self._computed(asked.system, 0, [])
            home = len(asked.system) if asked.context == "system" else 0
            moved = []
            for chunk, place in zip(asked.chunks, asked.places, strict=True):
                computed = self._computed(chunk, home, [system] if asked.context == "system" else [])
                moved.append([(self._turned(key, place - home), value) for key, value in computed])
            self.parts = [system, *moved]

    def greedy(self, count: int) -> tuple[list[int], Tensor]:
        """The most likely tokens one after the other, and the logits [count, V] they were chosen from."""
        with torch.inference_mode():
            logits, cache = self._read(self.asked.question, self.asked.question_place, self.parts)
            rows, tokens = [logits[-1]], []
            place = self.asked.question_place + len(self.asked.question)
            for _ in range(count - 1):
                tokens.append(int(rows[-1].argmax()))
                positions = torch.tensor([[place + len(tokens) - 1]])
                ids = torch.tensor([tokens[-1:]])
                rows.append(self.module(ids, past_key_values=cache, position_ids=positions).logits[0, -1])
            tokens.append(int(rows[-1].argmax()))
            return tokens, torch.stack(rows)

    def forced(self, tokens: Sequence[int]) -> Tensor:
        """Logits [tokens, V] when the answer is these tokens: question and answer in one forward."""
        ids = [*self.asked.question, *tokens[:-1]]
        with torch.inference_mode():
            return self._read(ids, self.asked.question_place, self.parts)[0][-len(tokens) :]

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """The same in one single forward over all tokens with one mask; only where no chunk is moved."""
        asked = self.asked
        assert (asked.strategy, asked.context) == ("shared", "system")
        ids, positions, owners = [*asked.system], [*range(len(asked.system))], [0] * len(asked.system)
        for number, (chunk, place) in enumerate(zip(asked.chunks, asked.places, strict=True), 1):
            ids += chunk
            positions += range(place, place + len(chunk))
            owners += [number] * len(chunk)
        last = [*asked.question, *tokens[:-1]]
        ids += last
        positions += range(asked.question_place, asked.question_place + len(last))
        owners += [-1] * len(last)
        owner = torch.tensor(owners)
        sees = (owner[:, None] == owner[None, :]) | (owner[None, :] == 0) | (owner[:, None] == -1)
        mask = sees & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        with torch.inference_mode():
            logits = self.module(
                torch.tensor([ids]), position_ids=torch.tensor([positions]), attention_mask=self._additive(mask)
            ).logits[0]
        return logits[-len(tokens) :]

    def _computed(self, ids: Sequence[int], place: int, seen: list[KeysAndValues]) -> KeysAndValues:
        """Keys and values of a run of tokens, alone or behind others."""
        _, cache = self._read(ids, place, seen)
        return [(layer.keys[:, :, -len(ids) :], layer.values[:, :, -len(ids) :]) for layer in cache.layers]

    def _read(self, ids: Sequence[int], place: int, seen: list[KeysAndValues]) -> tuple[Tensor, Any]:
        """One forward of neighbouring tokens that see all of `seen` and, causally, each other."""
        cache = DynamicCache(config=self.module.config)
        num_seen = 0
        for index in range(len(seen[0]) if seen else 0):
            keys = torch.cat([part[index][0] for part in seen], dim=2)
            cache.update(keys, torch.cat([part[index][1] for part in seen], dim=2), index)
            num_seen = keys.shape[2]
        mask = torch.ones(len(ids), num_seen + len(ids), dtype=torch.bool).tril(num_seen)
        positions = torch.arange(place, place + len(ids))[None]
        output = self.module(
            torch.tensor([list(ids)]),
            position_ids=positions,
            past_key_values=cache,
            attention_mask=self._additive(mask),
            use_cache=True,
        )
        return output.logits[0], cache

    def _additive(self, mask: Tensor) -> Tensor:
        """A mask of four dimensions, as eager attention adds it to the scores."""
        dtype = self.module.dtype
        return torch.zeros(1, 1, *mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    def _turned(self, keys: Tensor, distance: int) -> Tensor:
        """Keys as they would be `distance` positions later: halves of a head are the two coordinates of each pair."""
        config = self.module.config
        pairs = torch.arange(0, keys.shape[-1], 2, dtype=torch.float64)
        angles = distance * config.rope_parameters["rope_theta"] ** (-pairs / keys.shape[-1])
        first, second = keys.double().chunk(2, dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return turned.to(keys.dtype)
