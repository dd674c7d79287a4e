"""What cannot be composed says so at load: what it is, why not, and what to do instead."""

from __future__ import annotations

import pytest
import torch
from support.families import build
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from kvmosaic.errors import UnsupportedModel
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel, load_model


def t5() -> nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4))


def bart() -> nn.Module:
    torch.manual_seed(0)
    encoder = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    return BartForConditionalGeneration(BartConfig(vocab_size=64, d_model=32, **encoder, **decoder))


@pytest.mark.parametrize("make", [t5, bart])
def test_encoder_decoder_models_are_refused_in_memory_and_before_their_weights_are_read(make, tmp_path):
    model = make()
    with pytest.raises(UnsupportedModel, match=r"encoder-decoder model.*use a decoder-only model"):
        LoadedModel.from_module(model)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModel, match=r"encoder-decoder model.*use a decoder-only model"):
        load_model(tmp_path, device="cpu")


def test_a_decoder_with_relative_buckets_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2))
    model.transformer.h[0].attn.relative_attention_bias = nn.Embedding(32, 4)
    with pytest.raises(UnsupportedModel, match="relative position buckets"):
        LoadedModel.from_module(model)


@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma", "roformer"])
def test_a_refused_model_is_refused_with_the_chunk_cache_off_too(family, tmp_path):
    build(family, torch.float32).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="use another model"):
        LLM(tmp_path, device="cpu", enable_chunk_cache=False)
