"""Tiny random model for replays, with a tokenizer whose tokens are the words of the trace."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvmosaic.bench.trace.prompts import PromptWriter
from kvmosaic.errors import InvalidTrace

MAX_WORDS = 2**16
_UNKNOWN = "<unk>"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n\n{% endfor %}"
_MAX_POSITIONS = 2**17


def save_tiny_model(folder: Path, writer: PromptWriter, seed: int = 0) -> Path:
    """Writes a Llama of two small layers, and the tokenizer; returns the folder.

    Raises:
        InvalidTrace: the requests have more different blocks than the tokenizer may have words.
    """
    if writer.vocab_size > MAX_WORDS:
        raise InvalidTrace(
            f"these requests have {writer.vocab_size} different blocks, and the tiny model knows "
            f"{MAX_WORDS} words; replay fewer with --requests, or name another model"
        )
    words = {word: index for index, word in enumerate((*writer.words(), _UNKNOWN))}
    tokenizer = Tokenizer(models.WordLevel(words, _UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=_UNKNOWN)
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder
