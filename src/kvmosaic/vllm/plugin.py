"""Entry point that vLLM loads at startup, in each of its processes."""

from __future__ import annotations

import os

from kvmosaic.vllm.settings import document_reads

NAME = "kvmosaic"
"""The connector's name in `--kv-transfer-config`."""
_IN_PLACE = "kvmosaic.vllm.worker.in_place.attention"
BACKENDS = {
    "CPU_ATTN": f"{_IN_PLACE}.InPlaceCpuBackend",
    "FLASH_ATTN": f"{_IN_PLACE}.InPlaceFlashBackend",
    "TRITON_ATTN": f"{_IN_PLACE}.InPlaceTritonBackend",
}
"""Attention backends that read documents, by the name of vLLM's own that each extends; vLLM imports the one it uses."""
CLASS = "ComposingConnector"
"""Its class, by which a MultiConnector looks up its statistics."""


def register() -> None:
    """Registers the connector with vLLM; imports nothing until a configuration names it. Safe to call again.

    Where documents are read in place, attention backends of vLLM are replaced by ones that also do that.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in (NAME, CLASS):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvmosaic.vllm.connector", CLASS)
    if document_reads(os.environ) == "in-place":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        for name, path in BACKENDS.items():
            register_backend(AttentionBackendEnum[name], path)
