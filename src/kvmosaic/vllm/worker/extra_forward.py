"""Extra forward inside a worker: recomputes tokens for their keys and values only, as repairs of a step."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.vllm.operations import RepairedRun, cache_owner
from kvmosaic.vllm.worker.layouts.ascend import is_npu


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
        owner = cache_owner(layer) or name
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


class ExtraForward:
    """Runs tokens through the model, each run with its blocks as context.

    Every run becomes a batch row, with the block table of its request. A layer writes the keys and values of all
    rows before any row reads them, so rows of one request see each other as in an ordinary prefill:

        blocks of a request   │ s s s s │ a a a a │ a b b b │ b b q q │
        two runs                          a a             b b             the second sees the first as just computed
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, root_module: nn.Module) -> None:
        """Takes the module that vLLM's runner calls, once the paged caches are bound to its layers."""
        self.block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self.num_blocks = int(kv_cache_config.num_blocks)
        self.max_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        """Most tokens of one forward, for which vLLM's own buffers are allocated."""
        self.max_runs = int(vllm_config.scheduler_config.max_num_seqs)
        self.max_length = int(vllm_config.model_config.max_model_len)
        self.model_config = vllm_config.model_config
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self._config = vllm_config
        self._root = root_module
        self._device = next(root_module.parameters()).device
        self._groups = layer_groups(vllm_config, kv_cache_config, self._device)
        self._adapters: NoAdapters | None = None

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Context before the first request, in which rows use no LoRA adapter."""
        lora = getattr(self._config, "lora_config", None)
        if lora is None:
            yield
            return
        vocab_size = int(self.model_config.get_vocab_size())
        with NoAdapters.installed(self._root, int(lora.max_loras), vocab_size) as self._adapters:
            try:
                yield
            finally:
                self._adapters = None

    @torch.inference_mode()
    def forward(self, runs: Sequence[RepairedRun], *, compiled: bool = True) -> Any:
        """Computes the runs in one forward, which writes their keys and values to their blocks.

        Args:
            runs: at most `max_runs`, of at most `max_tokens` tokens together.
            compiled: False: without the compiled graph, which may not exist yet.

        Returns:
            Output of the model's root module: hidden states, in the order of the runs' lengths.
        """
        # backends expect rows that look like decode before longer ones
        with self.step(sorted(runs, key=lambda run: len(run.token_ids)), compiled=compiled) as rows:
            return self._root(
                input_ids=rows.token_ids, positions=rows.positions, intermediate_tensors=None, inputs_embeds=None
            )

    @contextmanager
    def step(self, runs: Sequence[RepairedRun], *, compiled: bool) -> Iterator[AttentionRows]:
        """Context in which vLLM's layers compute these runs, in this order; see `forward`."""
        from vllm.forward_context import set_forward_context

        assert 0 < len(runs) <= self.max_runs, f"{len(runs)} runs in one forward; at most {self.max_runs}"
        num_tokens = sum(len(run.token_ids) for run in runs)
        assert num_tokens <= self.max_tokens, f"{num_tokens} tokens in one forward; at most {self.max_tokens}"
        rows = AttentionRows.of(runs, self.block_size, self._device)
        metadata = self._metadata(rows)
        self._use_no_adapter(runs)
        with (
            _unseen_by_the_connector(),
            set_forward_context(
                metadata,
                self._config,
                num_tokens=num_tokens,
                num_tokens_across_dp=self._tokens_of_replicas(num_tokens),
                slot_mapping=dict.fromkeys(metadata, rows.slots),
                skip_compiled=not compiled,
            ),
        ):
            yield rows

    def resume(self, runs: Sequence[RepairedRun]) -> None:
        """Resumes the forward of these runs after it was interleaved with other steps.

        Builders and their kernels keep parts of the metadata that they built last.
        """
        from vllm.forward_context import get_forward_context

        get_forward_context().attn_metadata = self._metadata(AttentionRows.of(runs, self.block_size, self._device))
        self._use_no_adapter(runs)

    def _use_no_adapter(self, runs: Sequence[RepairedRun]) -> None:
        if self._adapters is not None:
            self._adapters.take_rows(sum(len(run.token_ids) for run in runs), len(runs))

    def _tokens_of_replicas(self, num_tokens: int) -> Tensor | None:
        """As if each replica ran as many: where they share experts, vLLM would ask the others, which may wait."""
        number = self._config.parallel_config.data_parallel_size
        return torch.full((number,), num_tokens, dtype=torch.int32) if number > 1 else None

    def _metadata(self, rows: AttentionRows) -> dict[str, Any]:
        return {name: made for group in self._groups for name, made in group.metadata(rows).items()}


@contextmanager
def _unseen_by_the_connector() -> Iterator[None]:
    """Hides the step's metadata, so that layers do not call the connector, ours or any other beside it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        yield
        return
    # not bind and clear, which would begin and end the step of every nested connector
    connector = get_kv_transfer_group()
    metadata, connector._connector_metadata = connector._connector_metadata, None
    try:
        yield
    finally:
        connector._connector_metadata = metadata


class Scope(IntEnum):
    """What may be called apart from the steps of vLLM's runner; each includes those before it."""

    CACHES = 0
    """The kernels that write caches."""
    ATTENTION = 1
    """Attention modules, one at a time, before the first request."""
    MODEL = 2
    """The whole model, before the first request."""
    SERVING = 3
    """The whole model, between steps."""


def make_forward(vllm_config: Any, kv_cache_config: Any, root_module: nn.Module) -> ExtraForward | str:
    """Creates an extra forward, or returns why there is none."""
    found = find_limits(vllm_config, kv_cache_config)
    if reasons := [reason for reason, scope in found.items() if scope < Scope.ATTENTION]:
        return "; ".join(reasons)
    try:
        return ExtraForward(vllm_config, kv_cache_config, root_module)
    except Exception as error:  # vLLM starts without it, whatever its backends raise
        return f"an attention backend was not made a second time: {type(error).__name__}: {error}"[:400]


def can_run(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why an extra forward must not run between steps under this configuration; empty: it may."""
    return "; ".join(find_limits(vllm_config, kv_cache_config))


def scope_at_start(vllm_config: Any, kv_cache_config: Any) -> Scope:
    """What may be called before the first request under this configuration."""
    return min((Scope.MODEL, *find_limits(vllm_config, kv_cache_config).values()))


def find_limits(vllm_config: Any, kv_cache_config: Any) -> dict[str, Scope]:
    """Reasons why no extra forward may run between steps, and what may be called nevertheless."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    is_set = {
        Scope.CACHES: {
            f"{len(groups)} groups of layers with blocks of their own": len(groups) != 1,
            "vLLM-Ascend: its attention takes metadata of its own, which is not made here": is_npu(vllm_config),
            "prefill context parallel": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "decode context parallel": getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "an encoder-decoder model": model.is_encoder_decoder,
            "a model that answers nothing": getattr(model, "runner_type", "generate") != "generate",
        },
        Scope.ATTENTION: {
            "pipeline parallel: hidden states go from stage to stage": parallel.pipeline_parallel_size > 1,
            "data parallel with experts: the other replicas would have to run as well": (
                parallel.data_parallel_size > 1 and getattr(parallel, "is_moe_model", None) is not False
            ),
            "experts are balanced by what a step ran": getattr(parallel, "enable_eplb", False),
            "a model that also takes images or sound": model.is_multimodal_model,
            "prompts given as embeddings": getattr(model, "enable_prompt_embeds", False),
            "kv_sharing_fast_prefill": getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False),
        },
        Scope.MODEL: {
            "speculative decoding": vllm_config.speculative_config is not None,
            "LoRA: which rows use which adapter is known for the step's own rows only": (
                vllm_config.lora_config is not None
            ),
        },
    }
    return {reason: scope for scope, reasons in is_set.items() for reason, holds in reasons.items() if holds}


class Repairer:
    """Carries out the repairs of a step, of several requests at once."""

    def __init__(self, nested: ExtraForward) -> None:
        self._nested = nested

    def run(self, repairs: Iterable[RepairedRun], *, compiled: bool = True) -> int:
        """Computes all runs; call it before the step's forward, and before its shifts are on.

        Returns:
            The number of forwards.
        """
        num_forwards = 0
        for runs in forwards(repairs, self._nested.max_tokens, self._nested.max_runs):
            self._nested.forward(runs, compiled=compiled)
            num_forwards += 1
        return num_forwards


def forwards(repairs: Iterable[RepairedRun], max_tokens: int, max_runs: int) -> Iterator[list[RepairedRun]]:
    """Splits the runs into batches of one forward each, such that no forward reads what a later one computes.

        max_tokens = 6:   runs of 4, 1 and 5 tokens   ->   │ 4 1 1 │ 4 │

    A token sees only tokens of lower index, in blocks of its own request or in blocks that another request shares at
    the same index. So runs are sorted by their start, and a run that does not fit is split.
    """
    runs: list[RepairedRun] = []
    room = max_tokens
    for repair in sorted(repairs, key=lambda repair: repair.start):
        rest = repair
        while rest.token_ids:
            if not room or len(runs) == max_runs:
                yield runs
                runs, room = [], max_tokens
            runs.append(replace(rest, token_ids=rest.token_ids[:room]))
            taken = len(runs[-1].token_ids)
            room -= taken
            rest = replace(
                rest, start=rest.start + taken, position=rest.position + taken, token_ids=rest.token_ids[taken:]
            )
    if runs:
        yield runs


class NoAdapters:
    """Which adapter each row of a forward uses, for rows that use none.

    vLLM's layers with adapters share an object that knows the adapter of each row of a step. Here they are given a copy
    of it: vLLM does not set its own again for a step whose rows are those of the step before.
    """

    def __init__(self, mappings: Sequence[Any], max_loras: int, vocab_size: int) -> None:
        self._mappings, self._max_loras, self._vocab_size = mappings, max_loras, vocab_size

    @classmethod
    @contextmanager
    def installed(cls, root: nn.Module, max_loras: int, vocab_size: int) -> Iterator[NoAdapters]:
        """Gives copies to all layers of a model inside this context."""
        layers: list[Any] = [module for module in root.modules() if getattr(module, "punica_wrapper", None) is not None]
        originals = [layer.punica_wrapper for layer in layers]
        copies = {id(original): copy.deepcopy(original) for original in originals}
        try:
            for layer, original in zip(layers, originals, strict=True):
                layer.set_mapping(copies[id(original)])
            yield cls(tuple(copies.values()), max_loras, vocab_size)
        finally:
            for layer, original in zip(layers, originals, strict=True):
                layer.set_mapping(original)

    def take_rows(self, num_tokens: int, num_runs: int) -> None:
        """Sets the rows of the next forward."""
        from vllm.lora.layers import LoRAMapping

        rows = LoRAMapping((0,) * num_tokens, (0,) * num_runs, is_prefill=True)
        for mapping in self._mappings:
            mapping.update_metadata(rows, [None] * self._max_loras, self._max_loras + 1, self._vocab_size)
