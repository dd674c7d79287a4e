"""Entry point that vLLM loads at startup, in each of its processes."""

from __future__ import annotations

import os

NAME = "kvmosaic"
"""The connector's name in `--kv-transfer-config`."""

READS_VARIABLE = "KVMOSAIC_DOCUMENT_READS"
"""Environment variable: "in-place" or "copy" (default)."""


def register() -> None:
    """Registers the connector with vLLM; imports nothing until a configuration names it. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvmosaic.integrations.vllm.connector", "ComposingConnector")
    if os.environ.get(READS_VARIABLE) == "in-place":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        ours = "kvmosaic.integrations.vllm.worker.in_place.cpu_backend.InPlaceCpuBackend"
        register_backend(AttentionBackendEnum.CPU_ATTN, ours)
