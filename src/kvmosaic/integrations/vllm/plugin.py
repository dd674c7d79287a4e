"""Entry point that vLLM loads at startup, in each of its processes."""

from __future__ import annotations

NAME = "kvmosaic"
"""The connector's name in `--kv-transfer-config`."""
CLASS = "ComposingConnector"
"""Its class, by which a MultiConnector looks up its statistics."""


def register() -> None:
    """Registers the connector with vLLM; imports nothing until a configuration names it. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in (NAME, CLASS):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvmosaic.integrations.vllm.connector", CLASS)
