"""What the tests of vLLM's own features ask an engine, and a LoRA adapter for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.asking import MESSAGES

TEXTS = ("The mill was built in 1907.", "The ferry goes to Oak Island.", "Trout live in the upper lake.")
SHAPES: dict[str, Any] = {
    "json": {
        "type": "object",
        "properties": {"open": {"type": "boolean"}},
        "required": ["open"],
        "additionalProperties": False,
    },
    "regex": "[0-9]{2}-[a-f]{3}",
    "choice": ["the mill", "the ferry"],
}


def constrained(engine: Any, kind: str, documents: list[str]) -> list[Any]:
    """The text of an answer in one of `SHAPES`, and its report."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from kvmosaic.vllm import chat

    params = SamplingParams(
        temperature=0, max_tokens=48, structured_outputs=StructuredOutputsParams(**{kind: SHAPES[kind]})
    )
    [answer] = chat(engine.llm, MESSAGES, params, documents=documents, repair="none", use_tqdm=False)
    return [answer.outputs[0].text, answer.kv_transfer_params["kvmosaic"]]


def adapted(engine: Any, adapter: str | None, documents: list[str], salt: str = "") -> list[Any]:
    """Tokens and report of an answer, by an adapter if there is one; nothing is shared with other salts."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from kvmosaic.vllm import chat

    by = None if adapter is None else LoRARequest("small", 1, adapter)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [answer] = chat(
        engine.llm, MESSAGES, params, documents=documents, repair="none", salt=salt, lora_request=by, use_tqdm=False
    )
    return [list(answer.outputs[0].token_ids), answer.kv_transfer_params["kvmosaic"]]


def make_adapter(model: Path, folder: Path) -> Path:
    """Writes a LoRA adapter of queries, keys and values, strong enough to change answers."""
    config = json.loads((model / "config.json").read_text())
    hidden, size = config["hidden_size"], config["head_dim"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, number in heads.items():
            start = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_"
            tensors[f"{start}A.weight"] = torch.randn(8, hidden, generator=draw)
            tensors[f"{start}B.weight"] = torch.randn(number * size, 8, generator=draw)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [f"{name}_proj" for name in heads]
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
