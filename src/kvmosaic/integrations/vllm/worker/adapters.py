"""LoRA at startup: rows of extra forwards that use no adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


class NoAdapters:
    """Which adapter each row of a forward uses, for rows that use none.

    vLLM's layers with adapters share an object that knows the adapter of each row of a step. Here they are given a copy
    of it: vLLM does not set its own again for a step whose rows are those of the step before.
    """

    def __init__(self, mappings: Sequence[Any], max_loras: int, vocab_size: int) -> None:
        self._mappings, self._max_loras, self._vocab_size = mappings, max_loras, vocab_size

    @classmethod
    @contextmanager
    def installed(cls, root: nn.Module, max_loras: int, vocab_size: int) -> Iterator[NoAdapters]:
        """Gives copies to all layers of a model inside this context."""
        layers: list[Any] = [module for module in root.modules() if getattr(module, "punica_wrapper", None) is not None]
        originals = [layer.punica_wrapper for layer in layers]
        copies = {id(original): copy.deepcopy(original) for original in originals}
        try:
            for layer, original in zip(layers, originals, strict=True):
                layer.set_mapping(copies[id(original)])
            yield cls(tuple(copies.values()), max_loras, vocab_size)
        finally:
            for layer, original in zip(layers, originals, strict=True):
                layer.set_mapping(original)

    def take_rows(self, num_tokens: int, num_runs: int) -> None:
        """Sets the rows of the next forward."""
        from vllm.lora.layers import LoRAMapping

        rows = LoRAMapping((0,) * num_tokens, (0,) * num_runs, is_prefill=True)
        for mapping in self._mappings:
            mapping.update_metadata(rows, [None] * self._max_loras, self._max_loras + 1, self._vocab_size)
