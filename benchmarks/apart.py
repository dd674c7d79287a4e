"""Reading documents apart, with transformers alone: nothing of the engine's layout, cache or attention code.

A document is computed after the system text and other texts, in a batch of ordinary forwards. Its keys are rotated to
its place in the prompt, and questions are answered over the keys and values of all documents, side by side. Computed
after all documents before it, each of them is what ordinary reading gives, so that full attention needs no code of its
own. Batches are fast on a GPU, even of small models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Apart:
    """A document, and the texts between the system text and it when it was computed."""

    ids: Ids
    behind: tuple[Ids, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A prompt: its documents as they were computed, and how they are read."""

    system: Ids
    documents: tuple[Apart, ...]
    question: Ids
    is_shared: bool = False
    """Whether all documents are at the same position; otherwise one after the other."""
    repaired: tuple[Ids, ...] = ()
    """Tokens of each document, counted from its first, that are computed again over everything before them."""


@dataclass
class Composed:
    """Keys and values of B readings, padded at their ends."""

    states: Tensor
    """[layers, 2, B, heads, L, dim], keys rotated to their places."""
    is_read: Tensor
    """[B, L], False where padded or replaced."""
    starts: Tensor
    """[B], the position of the question's first token."""

    def rows(self, numbers: Sequence[int]) -> Composed:
        """Some of the readings."""
        return Composed(self.states[:, :, numbers], self.is_read[numbers], self.starts[numbers])

    def cache(self) -> DynamicCache:
        """A new one, which can grow."""
        cache = DynamicCache()
        for number, (keys, values) in enumerate(self.states):
            cache.update(keys, values, number)
        return cache


class Reader:
    """A model of transformers. Rotary embeddings of one kind, and every layer attends to everything."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype, *, batch_tokens: int) -> None:
        where: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if where else path
        self.device = torch.device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.batch_tokens = batch_tokens
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self._computed: dict[tuple[Ids, Apart], Tensor] = {}

    @torch.inference_mode()
    def compose(self, readings: Sequence[Reading]) -> Composed:
        """Computes what is not known yet, and puts it in place."""
        systems = [Apart(reading.system) for reading in readings]
        self._compute([((), system) for system in systems])
        self._compute([(reading.system, document) for reading in readings for document in reading.documents])
        rows, starts = [], []
        for reading, system in zip(readings, systems, strict=True):
            place, end = len(reading.system), len(reading.system)
            parts = [self._computed[(), system]]
            for document in reading.documents:
                states = self._computed[reading.system, document]
                computed_at = len(reading.system) + sum(map(len, document.behind))
                parts.append(self.moved(states, place - computed_at))
                end = max(end, place + len(document.ids))
                place = place if reading.is_shared else end
            rows.append(torch.cat(parts, dim=-2))
            starts.append(end)
        longest = max(row.shape[-2] for row in rows)
        states = rows[0].new_zeros((*rows[0].shape[:2], len(rows), rows[0].shape[2], longest, rows[0].shape[-1]))
        is_read = torch.zeros(len(rows), longest, dtype=torch.bool, device=self.device)
        for number, row in enumerate(rows):
            states[:, :, number, :, : row.shape[-2]] = row
            is_read[number, : row.shape[-2]] = True
        composed = Composed(states, is_read, torch.tensor(starts, device=self.device))
        return self._repaired(composed, readings) if any(map(any, (each.repaired for each in readings))) else composed

    def forget(self) -> None:
        """Frees what was computed."""
        self._computed.clear()

    def _compute(self, wanted: Iterable[tuple[Ids, Apart]]) -> None:
        """Keys and values [layers, 2, heads, T, dim] of documents, at the positions at which they were computed."""
        new = {key: (*key[0], *(id for text in key[1].behind for id in text), *key[1].ids) for key in wanted}
        left = sorted((key for key in new if key not in self._computed), key=lambda key: len(new[key]))
        while left:
            count = max(1, self.batch_tokens // len(new[left[-1]]))
            keys, left = left[-count:], left[:-count]
            rows = [torch.tensor(new[key], device=self.device) for key in keys]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            cache = DynamicCache()
            self.model.model(input_ids=padded, past_key_values=cache, use_cache=True)
            states = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
            for number, key in enumerate(keys):
                end = len(new[key])
                self._computed[key] = states[:, :, number, :, end - len(key[1].ids) : end].clone()

    def moved(self, states: Tensor, by: int) -> Tensor:
        """Keys rotated by a number of positions, values as they are."""
        if not by:
            return states
        cos, sin = self.model.model.rotary_emb(states.float(), torch.tensor([[by]], device=self.device))
        keys = states[:, 0].float()
        half = keys.shape[-1] // 2
        turned = torch.cat([-keys[..., half:], keys[..., :half]], -1)
        return torch.stack([(keys * cos + turned * sin).to(states.dtype), states[:, 1]], 1)

    def _forward(self, composed: Composed, cache: DynamicCache, rows: Sequence[Ids], is_read: Tensor) -> Tensor:
        """Hidden states [B, Q, width] of rows after a cache; `is_read` [B, Q, keys] says what a token may read."""
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.device)
        positions = composed.starts[:, None] + torch.arange(ids.shape[1], device=self.device)
        return self._run(ids, positions, is_read, cache)

    def _run(self, ids: Tensor, positions: Tensor, is_read: Tensor, cache: DynamicCache) -> Tensor:
        found = self.model.model(
            input_ids=ids, position_ids=positions, attention_mask=is_read[:, None], past_key_values=cache
        )
        hidden: Tensor = found.last_hidden_state
        return hidden

    def _repaired(self, composed: Composed, readings: Sequence[Reading]) -> Composed:
        """Computes some tokens of each document again; the old ones are not read."""
        rows, places = [], []
        for reading in readings:
            ids, at, place = list[int](), list[int](), len(reading.system)
            for document, repaired in zip(reading.documents, reading.repaired, strict=True):
                ids += [document.ids[each] for each in repaired]
                at += [place + each for each in repaired]
                place += len(document.ids)
            rows.append(torch.tensor(ids, dtype=torch.long))
            places.append(torch.tensor(at, dtype=torch.long))
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(rows, batch_first=True).to(self.device)
        at = pad(places, batch_first=True, padding_value=-1).to(self.device)
        is_new = at >= 0
        kept = composed.is_read.clone()
        kept[is_new.nonzero()[:, 0], at[is_new]] = False
        order = torch.arange(kept.shape[1], device=self.device)
        reads_old = kept[:, None] & (order <= at[..., None])
        reads_new = is_new[:, None] & (at[:, None] <= at[..., None])
        reads_new |= torch.eye(ids.shape[1], dtype=torch.bool, device=self.device)  # padding reads itself
        cache = composed.cache()
        self._run(ids, at.clamp_min(0), torch.cat([reads_old, reads_new], -1), cache)
        states = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
        return replace(composed, states=states, is_read=torch.cat([kept, is_new], 1))

    def distributions(self, composed: Composed, readings: Sequence[Reading], answers: Sequence[Ids]) -> list[Tensor]:
        """Log probabilities [T, V] before each token of an answer to each reading's question.

        Gradients pass through what was composed, if it has any.
        """
        rows = [(*reading.question, *answer[:-1]) for reading, answer in zip(readings, answers, strict=True)]
        longest = max(map(len, rows))
        causal = torch.ones(longest, longest, dtype=torch.bool, device=self.device).tril()
        old = composed.is_read[:, None].expand(-1, longest, -1)
        hidden = self._forward(composed, composed.cache(), rows, torch.cat([old, causal.expand(len(rows), -1, -1)], -1))
        parts = [
            hidden[number, len(reading.question) - 1 : len(row)]
            for number, (reading, row) in enumerate(zip(readings, rows, strict=True))
        ]
        return [self.model.lm_head(part).float().log_softmax(-1) for part in parts]

    @torch.inference_mode()
    def answers(self, composed: Composed, readings: Sequence[Reading], num_tokens: int) -> list[Ids]:
        """Greedy answers, each with its end of text if that comes within so many tokens."""
        count, device = len(readings), self.device
        lengths = torch.tensor([len(reading.question) for reading in readings], device=device)
        longest = int(lengths.max())
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        old = composed.is_read[:, None].expand(-1, longest, -1)
        cache = composed.cache()
        rows = [reading.question for reading in readings]
        hidden = self._forward(composed, cache, rows, torch.cat([old, causal.expand(count, -1, -1)], -1))
        is_read = torch.cat([composed.is_read, torch.arange(longest, device=device) < lengths[:, None]], 1)
        last = hidden[torch.arange(count, device=device), lengths - 1]
        said: list[list[int]] = [[] for _ in rows]
        for step in range(num_tokens):
            chosen = self.model.lm_head(last).argmax(-1)
            for answer, token in zip(said, chosen.tolist(), strict=True):
                if not answer or answer[-1] not in self.ends:
                    answer.append(token)
            if step + 1 == num_tokens or all(answer[-1] in self.ends for answer in said):
                break
            is_read = torch.cat([is_read, is_read.new_ones(count, 1)], 1)
            positions = (composed.starts + lengths + step)[:, None]
            last = self._run(chosen[:, None], positions, is_read[:, None], cache)[:, 0]
        return [tuple(answer) for answer in said]
