"""Reader of documents in place: the positions of a forward's own tokens, and the attention of its layers.

Reads of one forward are made once for all layers with one mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvmosaic.attention.composed import apply_sinks
from kvmosaic.attention.native.backend import NativeBackend
from kvmosaic.attention.torch_backend import PlanReader
from kvmosaic.attention.triton.replays import Replays
from kvmosaic.attention.triton.work import uploaded
from kvmosaic.errors import NativeUnavailable
from kvmosaic.layers.geometry import MaskSpec
from kvmosaic.rope import RotationTables, paired
from kvmosaic.vllm.operations import InPlaceRequest
from kvmosaic.vllm.worker.in_place.step import InPlaceStep, OwnRows, PagedStep, rows_in, wanted
from kvmosaic.vllm.worker.key_rotation import Factors, KeyRotation
from kvmosaic.vllm.worker.kv_layout import KVLayout, LayerPlace
from kvmosaic.vllm.worker.layouts.cpu import CpuVectorLayout
from kvmosaic.vllm.worker.layouts.layout import FORMATS
from kvmosaic.vllm.worker.layouts.paged import pages_of
from kvmosaic.vllm.worker.position_shift import StepPositions, num_rows_of_step, without_graphs

if TYPE_CHECKING:
    from kvmosaic.attention.triton.backend import TritonReader


class DocumentReader:
    """Between `begin` and `end`, forwards of the model read the documents of these requests.

    The model's root gets the positions of own tokens, and `attend` is called by each attention layer. On a GPU, a
    Triton kernel reads all keys from the cache by blocks; on a CPU, they are put together first, layer by layer.
    """

    def __init__(self, places: KVLayout, *, is_paged: bool = False, replays: Replays | None = None) -> None:
        """Reads the caches of these layers.

        Args:
            places: the attention layers.
            is_paged: read by blocks, by the Triton kernel; see `why_not_paged`.
            replays: forwards of few rows that all read documents are replayed as one graph; None: piece by piece.
        """
        self._places = places
        self.replays = replays
        self._by_name = {place.name: place for place in places.layers}
        self._is_paged = is_paged
        self._positions = StepPositions(places.root)
        self.num_forwards = 0
        """Forwards of the model in which documents were read."""
        self._kinds = kinds_of(places)
        self._backend = None if is_paged else NativeBackend()
        self._row_bytes = max(4 * int(place.layer.num_heads) * place.layout.key_size for place in places.layers)
        self._requests: tuple[OwnRows, ...] = ()
        self._step: InPlaceStep | None = None
        self._reads: dict[MaskSpec, MaskReads] = {}
        self._planned: PagedStep | None = None
        self._slots = torch.empty(0, dtype=torch.int64)
        self.is_alone = False
        """Whether all rows of the current forward read documents: nothing is left for vLLM's kernel."""
        self._room: tuple[Tensor, Tensor] | None = None
        """Where a layer's keys and values are put together: again for the next layer and step of as many tokens."""
        self._errors: dict[str, float] | None = None
        """If not None, outputs are compared with vLLM's own, and not overwritten."""

    def begin(self, requests: Sequence[InPlaceRequest]) -> None:
        """Requests of a step. With none, nothing happens."""
        self.end()
        if requests:
            self._requests = tuple(OwnRows(each, each.num_scheduled, each.num_computed) for each in requests)
            self._positions.begin(self._prepare)
            if self.replays is not None:
                self._places.root.forward = self._forward

    def end(self) -> None:
        """Ends the step; safe at any time."""
        self._positions.end()
        if self._requests:
            self._places.root.__dict__.pop("forward", None)
        self._requests, self.is_alone = (), False
        self._take(None)

    def _take(self, step: InPlaceStep | None) -> None:
        self._step, self._reads = step, {}
        if step is not None:
            size = self._places.block_size
            self._reads = {mask: MaskReads(step, mask, size, self._backend) for mask in step.plans}

    @contextmanager
    def comparing(self, request: InPlaceRequest) -> Iterator[dict[str, float]]:
        """Context in which a request's rows are computed by both; gives the relative error by layer."""
        self.begin([request])
        self._errors = {}
        try:
            yield self._errors
        finally:
            self._errors = None
            self.end()

    @contextmanager
    def trying(self, step: InPlaceStep) -> Iterator[None]:
        """Context in which `attend` reads what a given step says."""
        self._take(step)
        try:
            yield
        finally:
            self._take(None)

    def _prepare(self, positions: Tensor, slots: Tensor) -> Tensor:
        slots = self._slots = slots[: positions.shape[-1]]
        num_own = sum(own.num_rows for own in self._requests)
        self.is_alone = self._errors is None and num_own == num_rows_of_step()
        num_rows = len(slots) if self.is_alone and self.replays is not None else num_own
        if self._is_paged:
            if self._planned is None or not self._planned.grow(self._requests, num_rows):
                self._planned = PagedStep(self._requests, self._places.block_size, self._kinds, num_rows)
            parts = uploaded(self._planned.parts, slots.device)
            rows = rows_in(slots, *parts[:2])[:num_rows]
            step = self._planned.step(parts, rows)
        else:
            parts = [torch.from_numpy(part) for part in wanted(self._requests, self._places.block_size, num_rows)]
            rows = rows_in(slots, *parts)[:num_rows]
            step = self.step_of(self._requests, rows)
        ascending, numbers = (part[:num_own] for part in parts[:2])
        # a row that is not found stops the device: the host waits for nothing of the step
        torch._assert_async((slots[rows[numbers]] == ascending).all())
        self._take(step)
        self.num_forwards += 1
        moved = positions.clone()
        moved[..., rows] = step.positions.to(moved)
        return moved

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model's root, replayed if all rows read documents and its shape is known."""
        forward = partial(type(self._places.root).forward, self._places.root)
        replays, planned, step, given = self.replays, self._planned, self._step, (*args, *kwargs.values(), self._slots)
        tensors = [each for each in given if isinstance(each, Tensor)]
        if replays is None or planned is None or not self.is_alone or len(tensors) < sum(x is not None for x in given):
            return forward(*args, **kwargs)
        addresses = tuple(number for each in tensors for number in (each.data_ptr(), *each.shape))
        if (shape := planned.shape(addresses, self._row_bytes)) is None:
            return forward(*args, **kwargs)

        def launch(parts: Sequence[Tensor]) -> Tensor:
            self._take(planned.step(parts, rows_in(self._slots, *parts[:2])))
            with without_graphs():
                result: Tensor = forward(*args, **kwargs)
            return result

        result = replays.run(shape, planned.parts, sum(own.num_rows for own in self._requests), launch)
        if result is not None:
            return result
        self._take(step)
        return forward(*args, **kwargs)

    def step_of(self, requests: Sequence[OwnRows], rows: Tensor) -> InPlaceStep:
        """The reads of these requests, as this reader takes them, which are rows [T] of a forward."""
        if not self._is_paged:
            return InPlaceStep.of(requests, self._places.block_size, rows, self._kinds)
        planned = PagedStep(requests, self._places.block_size, self._kinds, len(rows))
        return planned.step(uploaded(planned.parts, rows.device), rows)

    @property
    def is_reading(self) -> bool:
        """Whether rows of the current forward read documents."""
        return self._step is not None

    def attend(self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, output: Tensor, impl: Any) -> None:
        """Overwrites the outputs of the rows that read documents.

        Args:
            layer_name: vLLM's name of the attention layer.
            query: [T, H, D].
            key: [T, G, D], stored by now.
            value: [T, G, Dv].
            output: [T, H, Dv] of vLLM's kernel, which saw own tokens only.
            impl: the layer's implementation: its scale, soft cap and sinks.
        """
        step = self._step
        assert step is not None
        place = self._by_name[layer_name]
        rows = step.rows
        if query.dtype in FORMATS.values():  # by the layer, for a kernel that takes no others
            query = (query.float() * place.layer._q_scale).to(key.dtype)
        softcap = float(impl.logits_soft_cap or 0) or None
        reads = self._reads[place.mask]
        if self._is_paged:
            result, lse = reads.attend_paged(place, query[rows], float(impl.scale), softcap)
        else:
            stored_keys, stored_values = self._stored(place, step)
            pools = {
                None: self._own(place, key[rows], value[rows]),
                "chunk_cache": (stored_keys.to(key.dtype), stored_values.to(value.dtype)),
            }
            result, lse = reads.attend(place, query[rows], pools, float(impl.scale), softcap)
        if impl.sinks is not None:
            result = apply_sinks(result, lse, impl.sinks)
        if self._errors is not None:
            self._errors[layer_name] = relative_error(result, output[rows])
            return
        output[rows] = result.to(output.dtype)

    def _own(self, place: LayerPlace, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a forward's own rows as its kernel reads them, which stored them before."""
        how = place.layout.quantization
        return (keys, values) if how is None else how.rounded(keys, values)

    def _stored(self, place: LayerPlace, step: InPlaceStep) -> tuple[Tensor, Tensor]:
        """Keys [S, G, D] and values [S, G, Dv] of a step's slots, valid until the next call."""
        layout = place.layout
        if isinstance(layout, CpuVectorLayout):
            shape = (len(step.slots), layout.cache.shape[1], layout.key_size)
            if self._room is None or self._room[0].shape != shape or self._room[0].dtype is not layout.cache.dtype:
                self._room = torch.empty(shape, dtype=layout.cache.dtype), torch.empty(shape, dtype=layout.cache.dtype)
            return layout.read(step.slots, self._room)
        keys, values = layout.read(step.slots)
        assert values is not None
        return keys, values


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in multiples of the deviation of what is expected; infinite if it is no number."""
    error = float((found.double() - expected.double()).abs().max() / expected.double().std())
    return error if error == error else float("inf")


def document_reader(places: KVLayout, *, is_replayed: bool = False) -> DocumentReader | str:
    """The reader of all layers, or why there is none; see `DocumentReader` for what is replayed."""
    if any(place.layout.is_latent for place in places.layers):
        return "a latent cache (MLA) is not read in place"
    if places.is_shared:
        return "layers that read the cache of another layer are not read in place"
    implementations = [place.layer.impl for place in places.layers]
    if other := next((impl for impl in implementations if not hasattr(impl, "reader")), None):
        return (
            f"the attention {type(other).__name__} reads no documents; on a GPU, start with --attention-backend "
            "FLASH_ATTN or TRITON_ATTN"
        )
    is_paged = places.device.type != "cpu"
    if is_paged and (reason := why_not_paged(places)):
        return reason
    replays = Replays(places.device) if is_paged and is_replayed else None
    try:
        reader = DocumentReader(places, is_paged=is_paged, replays=replays)
    except NativeUnavailable as error:
        return f"on a CPU, documents are read by our C extension: {error}"
    for impl in implementations:
        impl.reader = reader
    return reader


def why_not_paged(places: KVLayout) -> str:
    """Why the Triton kernel does not read the caches of these layers; empty: it does."""
    try:
        from kvmosaic.attention.triton import backend as triton
    except ImportError as error:
        return f"documents are read by a Triton kernel, and Triton cannot be imported: {error}"
    for place in places.layers:
        pages = pages_of(place.layout)
        if pages is None:
            return f"{place.name}: a cache of the kind {type(place.layout).__name__} has no blocks of whole tokens"
        if reason := triton.why_not_paged(layer_dtype(place), int(place.layer.num_heads), *pages):
            return f"{place.name} has {reason}"
    return ""


def kinds_of(places: KVLayout) -> dict[MaskSpec, list[tuple[int, int]]]:
    """Query heads per key head, and key heads, of the layers with each mask."""
    kinds: dict[MaskSpec, list[tuple[int, int]]] = {}
    for place in places.layers:
        num_heads, num_kv_heads = int(place.layer.num_heads), int(place.layer.num_kv_heads)
        listed = kinds.setdefault(place.mask, [])
        if (kind := (num_heads // num_kv_heads, num_kv_heads)) not in listed:
            listed.append(kind)
    return kinds


def layer_dtype(place: LayerPlace) -> torch.dtype:
    """Dtype of the layer's queries, keys and values."""
    found = getattr(place.layer, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


class MaskReads:
    """The attention of all layers with one mask, in one forward."""

    def __init__(self, step: InPlaceStep, mask: MaskSpec, block_size: int, backend: NativeBackend | None) -> None:
        """Reads what the plan of a step says, on a CPU with this backend."""
        self._step, self._plan, self._block_size, self._backend = step, step.plans[mask], block_size, backend
        self._works = step.works.get(mask)
        self._pages: TritonReader | None = None
        self._reader: PlanReader | None = None
        self._turned: dict[KeyRotation, RotationTables] = {}

    def attend_paged(
        self, place: LayerPlace, query: Tensor, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """All reads of a layer by the Triton kernel, from the cache itself; the keys of own rows are stored there."""
        from kvmosaic.attention.triton.backend import PagedCache, TritonReader

        pages, how = pages_of(place.layout), place.layout.quantization
        assert pages is not None
        if self._pages is None:
            self._pages = TritonReader(self._plan, self._works)
        tables = self._tables(place.rotation, query.shape[2]) if self._plan.is_moved else None
        cache = PagedCache(*pages, self._step.slots, self._block_size, None if how is None else how.scales)
        return self._pages.attend_paged(query, cache, scaling=scaling, softcap=softcap, tables=tables)

    def attend(
        self, place: LayerPlace, query: Tensor, pools: dict[Any, Any], scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """All reads of a layer by our C extension, from keys and values that were put together."""
        if self._reader is None:
            assert self._backend is not None
            self._reader = self._backend.plan_reader(self._plan)
        tables = self._tables(place.rotation, query.shape[2]) if self._plan.is_moved else None
        done = self._reader.attend(query, pools, scaling=scaling, softcap=softcap, tables=tables)
        if done is None:
            raise NativeUnavailable(f"it takes no heads of {query.shape[2]} numbers in {query.dtype}")
        return done

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
    return RotationTables(cos, sin, partners, rotation=None)
