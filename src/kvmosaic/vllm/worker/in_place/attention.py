"""vLLM's attention backends with documents read in place: vLLM's kernel for all rows, then the rows that read."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from kvmosaic.vllm.worker.in_place.reader import DocumentReader


class ReadsDocuments:
    """Goes before an implementation of vLLM's among the parents of a class.

    vLLM's kernel computes all rows, unless all of them read documents. Rows that do are computed again, with their own
    tokens as one more piece, since kernels do not return the log-sum-exp of a row to merge with.
    """

    reader: DocumentReader | None = None
    """Set once documents can be read."""
    is_storing = True
    """Whether vLLM's kernel stores keys and values, too."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """As vLLM's."""
        reader = self.reader if self.reader is not None and self.reader.is_reading else None
        if reader is None or self.is_storing or not reader.is_alone:
            output = super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        if reader is not None:
            reader.attend(layer.layer_name, query, key, value, output, self)
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: outputs of rows that read documents are written in the model's dtype."""
        return False


_OF_VLLM = {
    "InPlaceCpuBackend": ("cpu_attn", "CPUAttentionBackend", "CPUAttentionBackendImpl"),
    "InPlaceFlashBackend": ("flash_attn", "FlashAttentionBackend", "FlashAttentionImpl"),
    "InPlaceTritonBackend": ("triton_attn", "TritonAttentionBackend", "TritonAttentionImpl"),
}
"""Module, backend and implementation of vLLM's that each extends; not all of them can be imported on one machine."""


def __getattr__(name: str) -> Any:
    """Makes a backend when vLLM looks it up."""
    if name not in _OF_VLLM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, backend, attention = _OF_VLLM[name]
    theirs, where = import_module(f"vllm.v1.attention.backends.{module}"), {"__module__": __name__}
    stores = {"is_storing": getattr(getattr(theirs, backend), "forward_includes_kv_cache_update", True)}
    parents = (ReadsDocuments, getattr(theirs, attention))
    ours = type(name.replace("Backend", "Attention"), parents, {**where, **stores})
    made = type(name, (getattr(theirs, backend),), {**where, "get_impl_cls": staticmethod(lambda: ours)})
    globals()[name] = made
    return made
