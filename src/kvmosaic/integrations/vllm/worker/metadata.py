"""Attention metadata for rows of our own, built by the backends' builders."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvmosaic.integrations.vllm.operations import RepairedRun


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Runs of tokens as one flat batch, one row each.

    token_ids, positions, slots [T]     │ run 0 │ run 1     │ run 2 │
    starts [rows + 1]                   0       3           8      11
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    """Slot for each token's keys and values."""
    starts: Tensor
    """Row offsets in `token_ids`, with the end of the last row."""
    lengths: Tensor
    """[rows]: tokens of a row's request up to the end of the row."""
    block_table: Tensor
    """[rows, most blocks of a row], padded with block 0."""

    @classmethod
    def of(cls, runs: Sequence[RepairedRun], block_size: int, device: torch.device) -> AttentionRows:
        """The rows of these runs, in their order."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths, tables = [0], [], []
        for run in runs:
            end = run.start + len(run.token_ids)
            blocks = run.blocks[: -(-end // block_size)]
            assert len(blocks) * block_size >= end, f"{len(run.blocks)} blocks hold no token {end - 1}"
            token_ids += run.token_ids
            positions += range(run.position, run.position + len(run.token_ids))
            slots += [blocks[i // block_size] * block_size + i % block_size for i in range(run.start, end)]
            starts.append(len(token_ids))
            lengths.append(end)
            tables.append(blocks)
        width = max(map(len, tables))
        return cls(
            # the dtypes that vLLM's runner passes to a model: a compiled one accepts no others
            token_ids=torch.tensor(token_ids, dtype=torch.int32).to(device),
            positions=torch.tensor(positions, dtype=torch.int64).to(device),
            slots=torch.tensor(slots, dtype=torch.int64).to(device),
            starts=torch.tensor(starts, dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor(
                [list(table) + [0] * (width - len(table)) for table in tables], dtype=torch.int32
            ).to(device),
        )

    def common(self, blocks_per_block: int) -> Any:
        """The batch as vLLM's common metadata, for a kernel whose blocks are parts of the scheduler's blocks."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        device = self.slots.device
        table = self.block_table
        if blocks_per_block > 1:
            parts = torch.arange(blocks_per_block, dtype=torch.int32, device=device)
            table = (table[:, :, None] * blocks_per_block + parts).flatten(1)
        known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
        optional = {
            "positions": self.positions,
            "seq_lens_cpu_upper_bound": self.lengths,
            "is_prefilling": torch.ones(len(self.lengths), dtype=torch.bool),
        }
        return CommonAttentionMetadata(
            query_start_loc=self.starts.to(device),
            query_start_loc_cpu=self.starts,
            seq_lens=self.lengths.to(device),
            num_reqs=len(self.lengths),
            num_actual_tokens=len(self.token_ids),
            max_query_len=int(self.starts.diff().max()),
            max_seq_len=int(self.lengths.max()),
            block_table_tensor=table,
            slot_mapping=self.slots,
            **{name: value for name, value in optional.items() if name in known},
        )


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one builder. The builder is ours: captured graphs read the state of the runner's own."""

    layer_names: tuple[str, ...]
    builder: Any
    blocks_per_block: int

    def metadata(self, rows: AttentionRows) -> dict[str, Any]:
        """Attention metadata of these rows, by layer."""
        return dict.fromkeys(self.layer_names, self.builder.build(0, rows.common(self.blocks_per_block)))


def layer_groups(vllm_config: Any, kv_cache_config: Any, device: torch.device) -> tuple[LayerGroup, ...]:
    """The attention layers of the only KV cache group, by what their builders must agree on."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.utils import AttentionGroup

    (group,) = kv_cache_config.kv_cache_groups
    layers = vllm_config.compilation_config.static_forward_context
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    by_kind: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        # a layer without its own cache reads that of another layer, and is in no group
        owner = getattr(layer, "kv_sharing_target_layer_name", None) or name
        if owner in group.layer_names:
            spec = group.kv_cache_spec if specs is None else specs[owner]
            backend = layer.get_attn_backend()
            by_kind.setdefault((backend, spec, getattr(layer, "num_heads", 0)), []).append(name)
    block_size = group.kv_cache_spec.block_size
    kernel_block_size = _kernel_block_size(
        block_size, [backend for backend, _, _ in by_kind], [spec for _, spec, _ in by_kind]
    )
    made = []
    with set_current_vllm_config(vllm_config):
        for (backend, spec, _), names in by_kind.items():
            kind = AttentionGroup(backend, names, spec, 0)
            kind.create_metadata_builders(vllm_config, device, kernel_block_size)
            made.append(LayerGroup(tuple(names), kind.get_metadata_builder(0), block_size // kernel_block_size))
    return tuple(made)


def _kernel_block_size(block_size: int, backends: list[Any], specs: list[Any]) -> int:
    """Tokens per block as the kernels count them: vLLM splits blocks that are too large for a kernel."""
    from vllm.v1.worker.utils import select_common_block_size

    arguments = (block_size, backends, specs)
    # the specs are an argument of later versions only
    return int(select_common_block_size(*arguments[: len(inspect.signature(select_common_block_size).parameters)]))
