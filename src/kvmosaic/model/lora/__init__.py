"""Low-rank adapters (LoRA): read from PEFT's files, kept beside the weights, and chosen for each row of a step."""

from kvmosaic.model.lora.adapter import LoraAdapter, read_adapter, write_adapter
from kvmosaic.model.lora.attach import (
    AdaptedRows,
    LoraLinear,
    adapter_scope,
    attach,
    computes_keys_of_base,
    merge,
    uncalled_layers,
)
