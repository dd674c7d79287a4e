"""Loaded tiny models and prompts for them."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvmosaic.attention.dense import DenseAttention
from kvmosaic.layout import DenseLayout, arrange, dense
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from support.families import build
from support.float64 import Float64
from support.tokenizers import CHATML, make_tokenizer


@cache
def loaded_family(family: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    """A tiny model of a family, built and probed once for all tests."""
    return LoadedModel.from_module(build(family, dtype))


def chatting_llama(family: str = "llama") -> LoadedModel:
    """A tiny model with a tokenizer that has a chat template."""
    tokenizer = make_tokenizer(CHATML)
    module = build(family, torch.float32, vocab_size=len(tokenizer), max_position_embeddings=2048)
    return LoadedModel.from_module(module, tokenizer)


def random_prompt(seed: int = 0, *, system: int = 5, chunks: tuple[int, ...] = (9, 4, 12), question: int = 6) -> Prompt:
    """A prompt of random tokens; without a system segment if `system` is 0."""
    numbers = np.random.default_rng(seed)
    parts = [numbers.integers(3, 128, length).tolist() for length in (system, *chunks, question)]
    return Prompt.from_tokens(system=parts[0] or None, chunks=parts[1:-1], question=parts[-1])


def dense_layout(prompt: Prompt, strategy: str = "shared") -> DenseLayout:
    """The layout of a prompt, written out."""
    return dense(arrange(prompt, strategy))


def dense_logits(model: LoadedModel, layout: DenseLayout) -> Tensor:
    """[T, V] logits of the dense twin."""
    return model.forward(
        torch.from_numpy(layout.token_ids),
        torch.from_numpy(layout.positions),
        torch.arange(len(layout.token_ids)),
        DenseAttention(layout, model.layers),
    )


@cache
def loaded_hybrid(family: str) -> LoadedModel:
    """A tiny model with layers that carry a state; it computes in float64 throughout, also when it is tried."""
    with Float64():
        return LoadedModel.from_module(build(family))
