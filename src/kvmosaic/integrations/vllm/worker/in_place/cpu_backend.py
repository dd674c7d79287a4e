"""vLLM's attention for CPUs, with documents read in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvmosaic.integrations.vllm.worker.in_place.reader import DocumentReader


class InPlaceCpuAttention(CPUAttentionBackendImpl):
    """vLLM's kernel for all rows; then rows that read documents are computed with them."""

    reader: DocumentReader | None = None
    """Set once documents can be read."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """As vLLM's."""
        result: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if self.reader is not None and self.reader.is_reading:
            self.reader.attend(layer.layer_name, query, key, value, output, self)
        return result


class InPlaceCpuBackend(CPUAttentionBackend):
    """Takes the place of CPU_ATTN, under its name."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Class of the layers' implementations."""
        return InPlaceCpuAttention
