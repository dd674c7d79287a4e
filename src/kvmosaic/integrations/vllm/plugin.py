"""Entry point that vLLM loads at startup, in each of its processes."""

from __future__ import annotations

import os

from kvmosaic.integrations.vllm.document_reads import document_reads

NAME = "kvmosaic"
"""The connector's name in `--kv-transfer-config`."""
CPU_BACKEND = "kvmosaic.integrations.vllm.worker.in_place.cpu_backend.InPlaceCpuBackend"
"""Registered under the name of vLLM's own, which it extends."""
CLASS = "ComposingConnector"
"""Its class, by which a MultiConnector looks up its statistics."""


def register() -> None:
    """Registers the connector with vLLM; imports nothing until a configuration names it. Safe to call again.

    Where documents are read in place, vLLM's attention for CPUs is replaced by one that also does that.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in (NAME, CLASS):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvmosaic.integrations.vllm.connector", CLASS)
    if document_reads(os.environ) == "in-place":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
