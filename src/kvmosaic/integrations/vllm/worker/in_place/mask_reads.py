"""Reads of one forward in the layers with one mask: what rows see of documents and of their own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvmosaic.attention.layer_backend import LayerBackend, PlanReader
from kvmosaic.attention.merge import merge_partials
from kvmosaic.attention.native.backend import NativeBackend
from kvmosaic.attention.reads import ReadPlan
from kvmosaic.attention.torch_backend import AttentionBackend, TorchBackend
from kvmosaic.errors import NativeUnavailable
from kvmosaic.integrations.vllm.worker.in_place.step import InPlaceStep
from kvmosaic.integrations.vllm.worker.key_rotation import Factors, KeyRotation
from kvmosaic.integrations.vllm.worker.kv_layout import LayerPlace
from kvmosaic.integrations.vllm.worker.layouts.paged import pages_of
from kvmosaic.rope import RotationTables, paired

if TYPE_CHECKING:
    from kvmosaic.attention.triton import TritonReader


class MaskReads:
    """The attention of all layers with one mask, in one forward."""

    def __init__(self, step: InPlaceStep, plan: ReadPlan, block_size: int, backend: AttentionBackend) -> None:
        """Reads what a plan of a step says, with a backend where keys were put together."""
        self._step, self._plan, self._block_size, self._backend = step, plan, block_size, backend
        self._pages: TritonReader | None = None
        self._reader: PlanReader | None = None
        self._turned: dict[KeyRotation, RotationTables] = {}

    def attend_paged(
        self, place: LayerPlace, query: Tensor, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """All reads of a layer by the Triton kernel, from the cache itself; the keys of own rows are stored there."""
        from kvmosaic.attention.triton import PagedCache, TritonReader

        pages, how = pages_of(place.layout), place.layout.quantization
        assert pages is not None
        if self._pages is None:
            self._pages = TritonReader(self._plan)
        tables = self._tables(place.rotation, query.shape[2]) if self._plan.is_moved else None
        cache = PagedCache(*pages, self._step.table, self._block_size, None if how is None else how.scales)
        return self._pages.attend_paged(query, cache, scaling=scaling, softcap=softcap, tables=tables)

    def attend(
        self, place: LayerPlace, query: Tensor, pools: dict[Any, Any], scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """All reads of a layer: at once by our C extension where it can, or one by one, merged by log-sum-exp."""
        plan = self._plan
        if isinstance(self._backend, LayerBackend):
            if self._reader is None:
                self._reader = self._backend.plan_reader(plan)
            tables = self._tables(place.rotation, query.shape[2]) if plan.is_moved else None
            done = self._reader.attend(query, pools, scaling=scaling, softcap=softcap, tables=tables)
            if done is not None:
                return done
        stacked = query[plan.rows]
        if plan.is_moved and place.rotation is not None:
            place.rotation.rotate(stacked, place.rotation.factors(*self._positions()))
        results = []
        for call in plan.calls:
            keys, values = pools[call.pool]
            run = slice(call.first_slot, call.first_slot + call.num_tokens)
            results.append(
                self._backend.attend(
                    stacked[call.first : call.last],
                    keys[run],
                    values[run],
                    scaling=scaling,
                    causal=call.causal,
                    mask=call.mask,
                    softcap=softcap,
                )
            )
        output, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
        return merge_partials(output, lse, plan.rows, plan.num_rows)

    def _tables(self, rotation: KeyRotation | None, head_dim: int) -> RotationTables | None:
        if rotation is None:
            return None
        if rotation not in self._turned:
            factors = rotation.factors(*self._positions())
            self._turned[rotation] = pair_tables(rotation, factors, head_dim)
        return self._turned[rotation]

    def _positions(self) -> tuple[Tensor, Tensor]:
        """[R], [R]: positions of the stacked queries, and the ones that they are turned to."""
        at = self._step.positions[self._plan.rows]
        return at, at - self._plan.distances.to(at.device)


def pair_tables(rotation: KeyRotation, factors: Factors, head_dim: int) -> RotationTables:
    """Factors of R keys as `kvmosaic.attention` takes them: [R, 1, D] each, the pair's sign in the sines."""
    num_rows, device = len(factors.cos), factors.cos.device
    cos, sin = torch.ones(num_rows, 1, head_dim, device=device), torch.zeros(num_rows, 1, head_dim, device=device)
    partners = torch.arange(head_dim, device=device)
    rotary = slice(rotation.first, rotation.first + rotation.rotary_dim)
    for table, first, second in ((cos, factors.cos, factors.cos), (sin, -factors.sin, factors.sin)):
        one, other = paired(table[..., rotary], rotation.layout)
        one.copy_(first)
        other.copy_(second)
    one, other = paired(partners[rotary], rotation.layout)
    both = one.clone(), other.clone()
    one.copy_(both[1])
    other.copy_(both[0])
    return RotationTables(cos, sin, partners, rotation=None)  # type: ignore[arg-type]


def attention_backend() -> AttentionBackend:
    """Our C extension where it was built, or torch."""
    try:
        backend: AttentionBackend = NativeBackend()
    except NativeUnavailable:
        backend = TorchBackend()
    assert isinstance(backend, LayerBackend | TorchBackend)
    return backend
