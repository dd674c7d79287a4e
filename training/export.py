"""Writes a checkpoint as a transformers model folder."""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.hybrid import DeltaNet
from training.model import FIELDS, SHAPES, ReaderConfig
from training.tokenizer import BEGIN, END, PAD, SPECIAL, token_id

CHAT_TEMPLATE = """{{- bos_token }}
{%- if messages and messages[0]['role'] == 'system' %}
    {{- '<|system|>' + messages[0]['content'] | trim + '\\n' }}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- for document in documents or [] %}
    {{- '<|document|>' }}
    {%- if document['title'] %}
        {{- document['title'] | trim + '\\n' }}
    {%- endif %}
    {{- document['text'] | trim + '\\n' }}
{%- endfor %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {{- '<|user|>' + message['content'] | trim + '\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|> ' + message['content'] | trim + '<|end|>' }}
    {%- else %}
        {{- raise_exception('The reader knows a system message only at the start; found role ' + message['role']) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


def model_config(config: ReaderConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """The content of config.json."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    common = {
        **{key: getattr(config, name) for name, key in FIELDS.items()},
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
        "kvmosaic_chunk_context": "system",  # a paragraph of prose, before its documents, confuses it
        "bos_token_id": token_id(tokenizer, BEGIN),
        "eos_token_id": token_id(tokenizer, END),
        "pad_token_id": token_id(tokenizer, PAD),
    }
    if not config.delta_layers:
        llama = {"rope_parameters": rope, "mlp_bias": False}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **common, **llama}
    kinds = ["linear" if layer in config.delta_layers else "full" for layer in range(config.layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **common,
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "linear_num_key_heads": config.heads,
        "linear_num_value_heads": config.heads,
        "linear_key_head_dim": config.head_size,
        "linear_value_head_dim": config.head_size,
        "linear_conv_kernel_dim": DeltaNet.taps + 1,
        "rope_parameters": {**rope, "partial_rotary_factor": 1.0, "mrope_section": mrope_section(config)},
    }


def mrope_section(config: ReaderConfig) -> list[int]:
    """Frequencies of a Qwen3.5 for time, height and width, which are all the same for text."""
    third = config.head_size // 2 // 3
    return [config.head_size // 2 - 2 * third, third, third]


def tokenizer_config(config: ReaderConfig) -> dict[str, object]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": SPECIAL[3:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    }


def export(checkpoint: Path, tokenizer_file: Path, output: Path, config: ReaderConfig) -> None:
    """Writes weights in bfloat16, configuration, tokenizer and chat template."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    weights = {name: value.to(torch.bfloat16) for name, value in load_file(checkpoint / "model.safetensors").items()}
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(output / "tokenizer.json"))
    documents: dict[str, dict[str, object]] = {
        "config.json": model_config(config, tokenizer),
        "tokenizer_config.json": tokenizer_config(config),
        "generation_config.json": {
            "bos_token_id": token_id(tokenizer, BEGIN),
            "eos_token_id": token_id(tokenizer, END),
            "pad_token_id": token_id(tokenizer, PAD),
            "do_sample": False,
            "max_new_tokens": 32,
        },
    }
    for name, content in documents.items():
        (output / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder with model.safetensors")
    parser.add_argument("output", type=Path, help="model folder to write")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; the checkpoint's own by default")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    options = parser.parse_args()
    tokenizer = options.tokenizer or options.checkpoint / "tokenizer.json"
    export(options.checkpoint, tokenizer, options.output, SHAPES[options.shape])


if __name__ == "__main__":
    main()
