"""Other connectors beside ours: vLLM's offloading with a worker for CPUs, and one that has a handshake of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from support.vllm.forking import CONNECTOR

LOADED: list[int] = []
"""Number of blocks of every load of `CopyingWorker`s in this process."""


def beside(*others: dict[str, Any], ours_first: bool = True) -> dict[str, Any]:
    """The configuration of our connector and others in a MultiConnector."""
    connectors = [CONNECTOR, *others] if ours_first else [*others, CONNECTOR]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def other(name: str, module: str | None = None, **extra: Any) -> dict[str, Any]:
    """The configuration of another connector."""
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return config if module is None else {**config, "kv_connector_module_path": module}


OFFLOADING = other(
    "OffloadingConnector", spec_name="CopyingSpec", spec_module_path=__name__, cpu_bytes_to_use=2**26, block_size=32
)
SPEAKING = other("SpeakingConnector", __name__)


class CopyingWorker(OffloadingWorker):
    """Copies blocks at once: vLLM's own worker needs streams of a GPU."""

    def __init__(self, kv_caches: Any, num_chunks: int) -> None:
        self._device = [each.tensor for each in kv_caches.tensors]
        self._host = [torch.zeros((num_chunks, part.shape[1]), dtype=part.dtype) for part in self._device]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        LOADED.append(len(dst_spec.block_ids))
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> bool:
        for one, another in zip(sources, targets, strict=True):
            another[torch.from_numpy(target.block_ids).long()] = one[torch.from_numpy(source.block_ids).long()]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All are done."""


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's offloading to memory, with blocks copied by `CopyingWorker`."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        self._copying = getattr(self, "_copying", None) or CopyingWorker(kv_caches, self.num_chunks)
        return self._copying


class Spoken(KVConnectorHandshakeMetadata):
    """What `SpeakingConnector` tells others."""


class SpeakingConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores nothing, and says something when the engine starts."""

    def get_handshake_metadata(self) -> Spoken:
        return Spoken()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
