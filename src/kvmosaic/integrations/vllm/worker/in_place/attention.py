"""What the attention of every backend does to read documents: vLLM's kernel for all rows, then the rows that read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvmosaic.integrations.vllm.worker.in_place.reader import DocumentReader


class ReadsDocuments:
    """Goes before an implementation of vLLM's among the parents of a class.

    vLLM's kernel computes all rows. Rows that read documents are computed again, with their own tokens as one more
    piece, since kernels do not return the log-sum-exp of a row to merge with.
    """

    reader: DocumentReader | None = None
    """Set once documents can be read."""

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
        computed: Tensor = super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if self.reader is not None and self.reader.is_reading:
            self.reader.attend(layer.layer_name, query, key, value, output, self)
        return computed

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: outputs of rows that read documents are written in the model's dtype."""
        return False
