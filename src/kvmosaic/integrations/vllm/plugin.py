"""Entry point that vLLM loads at startup, in each of its processes."""

from __future__ import annotations

NAME = "kvmosaic"
"""The connector's name in `--kv-transfer-config`."""


def register() -> None:
    """Registers the connector with vLLM; imports nothing until a configuration names it. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvmosaic.integrations.vllm.connector", "ComposingConnector")
