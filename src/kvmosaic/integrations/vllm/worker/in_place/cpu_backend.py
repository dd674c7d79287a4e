"""vLLM's attention for CPUs, with documents read in place."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvmosaic.integrations.vllm.worker.in_place.attention import ReadsDocuments


class InPlaceCpuAttention(ReadsDocuments, CPUAttentionBackendImpl):
    """CPU_ATTN, and rows that read documents."""


class InPlaceCpuBackend(CPUAttentionBackend):
    """Takes the place of CPU_ATTN, under its name."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Class of the layers' implementations."""
        return InPlaceCpuAttention
