"""transformers `generate` as a peer, with the KV cache of the last prompt reused for the longest common prefix."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvmosaic.bench.peers.peer import BatchTimes, RequestTimes, joined_ids
from kvmosaic.prompt import Prompt


class GeneratePeer:
    """transformers. Prompts of one length are answered as one batch without reuse, others one after the other."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.name = "transformers generate"
        self.dtype = dtype
        self.is_ours = False
        self.process_id = os.getpid()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True)
        self._model.eval()
        self._kept: tuple[list[int], Any] = ([], None)

    def reset(self) -> None:
        """See `Peer.reset`."""
        self._kept = ([], None)

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> BatchTimes:
        """See `Peer.answer`."""
        rows = [joined_ids(prompt) for prompt in prompts]
        begin = time.monotonic()
        if len(rows) > 1 and len({len(row) for row in rows}) == 1:
            self.reset()
            readings = self._answer(rows, num_answer, None, 0, begin)
        else:
            readings = [reading for row in rows for reading in self._answer_one(row, num_answer, begin)]
        seconds = time.monotonic() - begin
        cache = self._kept[1]
        held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values)) if cache else None
        return BatchTimes(seconds, tuple(readings), held)

    def close(self) -> None:
        """See `Peer.close`."""
        self.reset()

    def _answer_one(self, row: list[int], num_answer: int, begin: float) -> list[RequestTimes]:
        kept, cache = self._kept
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept, row[:-1], strict=False)))
        if cache is None or not same:
            cache, same = DynamicCache(config=self._model.config), 0
        else:
            if excess := cache.get_seq_length() - same:
                cache.crop(-excess)
            assert cache.get_seq_length() == same, "a cache is cut to the common beginning"
        return self._answer([row], num_answer, cache, same, begin)

    def _answer(
        self, rows: list[list[int]], num_answer: int, cache: Any, num_reused: int, begin: float
    ) -> list[RequestTimes]:
        ids = torch.tensor(rows)
        times = _TokenTimes()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=times,
            do_sample=False,
            max_new_tokens=num_answer,
            min_new_tokens=num_answer,
            pad_token_id=0,
        )
        if cache is not None:
            # the last token was sampled and never computed
            self._kept = (output[0].tolist()[: cache.get_seq_length()], cache)
        first, last = times.seconds[1], times.seconds[-1]
        reading = RequestTimes(
            first_seconds=first - begin,
            token_seconds=(last - first) / (num_answer - 1) if num_answer > 1 else None,
            num_prompt=ids.shape[1],
            num_answer=num_answer,
            num_computed=ids.shape[1] - num_reused,
        )
        return [reading] * len(rows)


class _TokenTimes(BaseStreamer):  # type: ignore[misc]  # transformers is read without its types
    """Streamer that records when transformers emits the prompt and each token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(time.monotonic())

    def end(self) -> None:
        pass
