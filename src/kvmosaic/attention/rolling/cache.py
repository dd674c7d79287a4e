"""Rolling KV cache of one attention layer: sinks that are never evicted, then a window of the newest tokens."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Shaped
from torch import Tensor

from kvmosaic.attention.rolling.positions import Places, sink_distance
from kvmosaic.errors import InvalidChunk, InvalidConfig, OutOfStep

_ROWS_PER_BLOCK = 8
"""Number of memmove calls that take about as long as one torch call."""

# A torch custom operation, so that torch.compile does not trace into it.
_NAME = "kvmosaic::shift_left"
torch.library.define(_NAME, "(Tensor(a!) storage, int dim, SymInt start, SymInt stop, SymInt by) -> ()")


def shift_left(storage: Shaped[Tensor, "*storage"], dim: int, start: int, stop: int, by: int) -> None:
    """Moves the tokens start + by … stop - 1 of dimension `dim` to start …; evicted ones are overwritten.

    Source and target may overlap. memmove handles that in one call, where the storage is in
    host memory. Elsewhere blocks of `by` tokens are copied from left to right, each to slots just vacated: with
    chunks much smaller than the window that is many calls, and a ring is the better choice.

    Args:
        storage: contiguous, any rank.
        dim: dimension of the tokens.
        start: target of the first token that stays.
        stop: end of the tokens that move.
        by: how far they move.
    """
    torch.ops.kvmosaic.shift_left(storage, dim, start, stop, by)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _shift_left(storage: Tensor, dim: int, start: int, stop: int, by: int) -> None:
    assert storage.is_contiguous(), "the storage of a rolling cache is contiguous"
    num_rows = math.prod(storage.shape[:dim])
    num_blocks = -(-(stop - start - by) // by)
    if storage.device.type == "cpu" and num_rows <= _ROWS_PER_BLOCK * num_blocks:
        move_rows(storage, dim, start, stop, by)
    else:
        copy_blocks(storage, dim, start, stop, by)
    torch.autograd.graph.increment_version(storage)  # autograd must detect that the old keys are overwritten


def _shift_nothing(storage: Tensor, dim: int, start: int, stop: int, by: int) -> None:
    """Fake implementation for compilers: the storage is written."""


torch.library.register_fake(_NAME, _shift_nothing)


def copy_blocks(storage: Shaped[Tensor, "*storage"], dim: int, start: int, stop: int, by: int) -> None:
    """One copy for every `by` tokens, to slots that the previous copy has vacated."""
    for place in range(start, stop - by, by):
        length = min(by, stop - by - place)
        storage.narrow(dim, place, length).copy_(storage.narrow(dim, place + by, length))


def move_rows(storage: Shaped[Tensor, "*storage"], dim: int, start: int, stop: int, by: int) -> None:
    """One memmove for each row of `dim`, in host memory."""
    token_bytes = storage.stride(dim) * storage.element_size()
    row_bytes, num_bytes = storage.shape[dim] * token_bytes, (stop - start - by) * token_bytes
    first = storage.data_ptr() + start * token_bytes
    for target in range(first, first + math.prod(storage.shape[:dim]) * row_bytes, row_bytes):
        ctypes.memmove(target, target + by * token_bytes, num_bytes)


@dataclass(eq=False)
class BlockKVCache:
    """Keys and values of an endless causal stream, in memory of fixed size.

        filling     [ 0 1 | 2 3 4 5 . . ]        cached_k() is the valid prefix
        full        [ 0 1 | 2 3 4 5 6 7 ]        2 sinks, window of 6, chunks of 2
        rolled      [ 0 1 | 4 5 6 7 8 9 ]        ordered=True: the window moves left, then 8 9 are written
                    [ 0 1 | 8 9 4 5 6 7 ]        ordered=False: 8 9 take the slots of 2 3, nothing moves

    One step for chunk i = 0, 1, 2, …:

        cache.before_update(i)               # the next chunk, or the same again to overwrite it; evicts
        cache.update(k, v)                   # exactly chunk_size tokens; may be called again
        cache.cached_k(), cache.cached_v()   # views with the new chunk in them
        cache.after_update(i)

    It always holds the first `sink_size` and the last `window_size` tokens of what was written, each chunk in
    its last version. Sizes need not divide each other: a chunk may cross the end of the sinks, and of a chunk
    longer than the window the newest tokens stay.

    Once it is full, `update` writes to the same addresses in every step and `cached_k` reads from the same, so that a
    CUDA graph captured in one step can be replayed in the next ones, between calls of `before_update` and
    `after_update`; nothing is allocated. That is why the window does not slide through spare memory.

    The memory is that of `k_shape` and `v_shape`, no more. Nothing in it has a gradient. Any call may be made in
    `torch.compile(fullgraph=True)`.

    Raises (by all methods):
        InvalidConfig: sizes or shapes that do not fit.
        OutOfStep: a call in the wrong order.
        InvalidChunk: a chunk whose number, shape, dtype or device does not fit.
    """

    k_shape: tuple[int, ...]
    """Shape of all keys, of any rank, with `sink_size + window_size` tokens in dimension `seq_dim`."""
    v_shape: tuple[int, ...]
    """Shape of all values: as the keys, but for the last dimension."""
    seq_dim: int
    """Dimension of the tokens; may be given from the right (negative), is kept from the left."""
    chunk_size: int
    """Tokens of every chunk."""
    window_size: int
    """Number of newest tokens that are visible beside the sinks."""
    sink_size: int = 0
    """Number of first tokens of the stream, which are never evicted."""
    device: torch.device | str | None = None
    """Device of the memory; default the first GPU, or the CPU if there is none."""
    dtype: torch.dtype | None = None
    """Dtype of keys, values and every chunk; default torch's."""
    ordered: bool = True
    """Whether views are in order, oldest to newest. False: the window is a ring and no token ever moves. Attention
    does not mind the order when keys are already rotated and every query sees all of them."""

    _places: Places = field(init=False, repr=False)
    _k: Tensor = field(init=False, repr=False)
    _v: Tensor = field(init=False, repr=False)
    _slots: Tensor | None = field(init=False, repr=False)
    """[num_kept] ring slots of the newest chunk's last tokens. On the device, where a graph reads them."""
    _newest: int = field(init=False, default=-1, repr=False)
    """Number of the last chunk that is complete; -1 before the first."""
    _current: int | None = field(init=False, default=None, repr=False)
    """Number of the chunk in progress."""
    # Read by `update` and the views once the cache is full. Not numbers: for a cache that belongs to a module,
    # torch.compile builds a new graph for every number that has changed.
    _is_open: bool = field(init=False, default=False, repr=False)
    """Whether a chunk may be written."""
    _is_written: bool = field(init=False, default=False, repr=False)
    """Whether `update` was called for the chunk in progress, in this step or when it was first written."""
    _is_steady: bool = field(init=False, default=False, repr=False)
    """Whether the cache was full before the chunk in progress or the last one, and that has no sinks in it."""

    def __post_init__(self) -> None:
        sizes = Places(
            sink_size=whole_number("sink_size", self.sink_size, 0),
            window_size=whole_number("window_size", self.window_size, 1),
            chunk_size=whole_number("chunk_size", self.chunk_size, 1),
        )
        self.k_shape, self.v_shape = shape_of("k_shape", self.k_shape), shape_of("v_shape", self.v_shape)
        self.seq_dim = dimension(self.seq_dim, len(self.k_shape))
        check_shapes(self.k_shape, self.v_shape, self.seq_dim, self.sink_size, self.window_size)
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = dtype_of(self.dtype)
        self._places = sizes
        with torch.inference_mode(False):  # otherwise it could be written in inference mode only
            self._k = torch.zeros(self.k_shape, device=self.device, dtype=self.dtype)
            self._v = torch.zeros(self.v_shape, device=self.device, dtype=self.dtype)
            self._slots = None if self.ordered else torch.zeros(sizes.num_kept, dtype=torch.int64, device=self.device)
        self.device = self._k.device
        self.reset()

    @classmethod
    def from_tensor(cls, k: Shaped[Tensor, "*k"], v: Shaped[Tensor, "*v"], seq_dim: int) -> BlockKVCache:
        """A full cache around one chunk, number 0, without sinks.

        Nothing is copied: the tensors are the memory, and are written by `update`. That may be called at once, to
        overwrite all of it (keys and values of a text, an image, a condition), or in steps from 0 or 1 on.

        Args:
            k: keys, any rank.
            v: values: shape of the keys but for the last dimension, same dtype and device.
            seq_dim: dimension of the tokens; may be negative.
        """
        if v.dtype != k.dtype or v.device != k.device:
            raise InvalidChunk(
                f"keys are in {k.dtype} on {k.device}, values in {v.dtype} on {v.device}; make them equal"
            )
        size = k.shape[dimension(seq_dim, k.dim())]
        cache = cls(tuple(k.shape), tuple(v.shape), seq_dim, size, size, device="meta", dtype=k.dtype)
        cache.device, cache._k, cache._v = k.device, k.detach(), v.detach()
        cache._newest, cache._is_open, cache._is_written, cache._is_steady = 0, True, True, True
        return cache

    def before_update(self, chunk_index: int) -> None:
        """Begins a step: evicts tokens for a new chunk; a repeated chunk will be overwritten.

        Args:
            chunk_index: one more than that of the last step, or the same.
        """
        if self._current is not None:
            raise OutOfStep(
                f"before_update({chunk_index}) while chunk {self._current} is under way; "
                f"call after_update({self._current}) first, or reset()"
            )
        if isinstance(chunk_index, bool) or not isinstance(chunk_index, int):
            raise InvalidChunk(f"before_update got chunk {chunk_index!r}; give a whole number")
        if chunk_index == self._newest + 1:
            self._make_room(chunk_index)
            self._is_written = False
        elif chunk_index != self._newest or chunk_index < 0:
            again = f"{self._newest} again or " if self._newest >= 0 else ""
            raise InvalidChunk(
                f"before_update({chunk_index}), but the last chunk was {self._newest if again else 'none'}; "
                f"next comes {again}{self._newest + 1}"
            )
        self._is_steady = self._is_steady_with(chunk_index)
        self._current, self._is_open = chunk_index, True

    def update(self, k: Shaped[Tensor, "*k"], v: Shaped[Tensor, "*v"]) -> None:
        """Writes the chunk in progress; called again, it is overwritten.

        Args:
            k: exactly chunk_size tokens in dimension `seq_dim`, the rest as in `k_shape`.
            v: the same for `v_shape`.
        """
        if not self._is_open:
            raise OutOfStep(f"update outside a step; call before_update({self._newest + 1}) first")
        check_chunk("k", k, self._k, self.seq_dim, self.chunk_size)
        check_chunk("v", v, self._v, self.seq_dim, self.chunk_size)
        for storage, chunk in ((self._k, k.detach()), (self._v, v.detach())):
            if self._slots is not None and (self._is_steady or self._places.is_behind_sinks(self._seen)):
                self._write_ring(storage, chunk, self._slots)
            else:
                for run in (self._places.newest_run,) if self._is_steady else self._places.runs(self._seen):
                    target = storage.narrow(self.seq_dim, run.target, run.length)
                    target.copy_(chunk.narrow(self.seq_dim, run.source, run.length))
        self._is_written = True

    def cached_k(self) -> Shaped[Tensor, "*k"]:
        """View of the visible keys: sinks, then window; `size` tokens in dimension `seq_dim`."""
        return self._k.narrow(self.seq_dim, 0, self.size)

    def cached_v(self) -> Shaped[Tensor, "*v"]:
        """View of the visible values: sinks, then window; `size` tokens in dimension `seq_dim`."""
        return self._v.narrow(self.seq_dim, 0, self.size)

    def after_update(self, chunk_index: int) -> None:
        """Ends the step. In a full cache a captured graph may have written the chunk, without a call of `update`.

        Args:
            chunk_index: the one of `before_update`.
        """
        if self._current is None:
            raise OutOfStep(f"after_update({chunk_index}) outside a step; call before_update first")
        if chunk_index != self._current:
            raise InvalidChunk(f"after_update({chunk_index}), but chunk {self._current} is under way")
        if not (self._is_written or self._is_steady):
            raise OutOfStep(f"after_update({chunk_index}), but chunk {chunk_index} was not written; call update first")
        self._newest, self._current, self._is_open = self._current, None, False

    def reset(self) -> None:
        """Clears the cache, including a chunk in progress; the next one is 0. The memory keeps its address."""
        self._newest, self._current = -1, None
        self._is_open = self._is_steady = False
        if self._slots is not None:
            places = torch.arange(len(self._slots), device=self._slots.device)
            self._slots.copy_((places - len(self._slots) - self.sink_size) % self.window_size)

    @property
    def size(self) -> int:
        """Number of visible tokens, including the chunk in progress."""
        return self._places.total_size if self._is_steady else self._places.size(self._seen)

    @property
    def write_end(self) -> int:
        """Right edge in the cache of the chunk in progress, or of the last one. With `ordered` that is `size`."""
        return self.size if self.ordered else self._places.ring_end(self._seen)

    @property
    def sink_distance(self) -> int:
        """How far the sinks are moved to be right before the window; see the function `sink_distance`."""
        return sink_distance(self._places.num_tokens(self._seen), self.sink_size, self.window_size)

    def is_steady_state(self) -> bool:
        """Whether the cache was full before the chunk in progress (or the next one): addresses no longer change."""
        return self._is_steady_with(self._newest + 1) if self._current is None else self._is_steady

    @property
    def _seen(self) -> int:
        """Number of the chunk in progress, or of the last one."""
        return self._newest if self._current is None else self._current

    def _is_steady_with(self, chunk_index: int) -> bool:
        """Whether the cache was full before this chunk is written, and all of the chunk goes to the window."""
        return self._places.is_full_before(self._newest + 1) and self._places.is_behind_sinks(chunk_index)

    def _make_room(self, chunk_index: int) -> None:
        """Evicts the oldest tokens of the window for a chunk that is written for the first time."""
        if self._slots is not None:
            self._slots.add_(self.chunk_size).remainder_(self.window_size)
            return
        shift = self._places.shift(chunk_index)
        if shift is not None:
            for storage in (self._k, self._v):
                shift_left(storage, self.seq_dim, shift.start, shift.stop, shift.by)

    def _write_ring(self, storage: Tensor, chunk: Tensor, slots: Tensor) -> None:
        """Writes the newest tokens of a chunk to their slots."""
        window = storage.narrow(self.seq_dim, self.sink_size, self.window_size)
        newest = chunk.narrow(self.seq_dim, self.chunk_size - len(slots), len(slots))
        if storage.element_size() == 1:  # torch cannot index every one-byte dtype
            window, newest = window.view(torch.uint8), newest.view(torch.uint8)
        window.index_copy_(self.seq_dim, slots, newest)


MAX_SIZE = 2**40
"""Max value of every size argument; memory ends long before."""


def whole_number(name: str, value: object, least: int) -> int:
    """The value, if it is a whole number from `least` to `MAX_SIZE`.

    Raises:
        InvalidConfig: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
        raise InvalidConfig(f"{name} is {value!r}; give a whole number from {least} to {MAX_SIZE}")
    return value


def shape_of(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple, if it is one of at least one dimension.

    Raises:
        InvalidConfig: it is not.
    """
    if isinstance(shape, str) or not isinstance(shape, Sequence) or not shape:
        raise InvalidConfig(f"{name} is {shape!r}; give the size of each dimension")
    return tuple(whole_number(f"{name}[{number}]", size, 1) for number, size in enumerate(shape))


def dimension(seq_dim: int, rank: int) -> int:
    """The dimension of the tokens, counted from the left.

    Raises:
        InvalidConfig: there is no such dimension.
    """
    if isinstance(seq_dim, bool) or not isinstance(seq_dim, int) or not -rank <= seq_dim < rank:
        raise InvalidConfig(f"seq_dim is {seq_dim!r}; shapes of {rank} dimensions have {-rank} to {rank - 1}")
    return seq_dim % rank


def dtype_of(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of keys and values: torch's default if none is given.

    Raises:
        InvalidConfig: it is not a torch dtype.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidConfig(f"dtype is {dtype!r}; give one of torch, such as torch.bfloat16")
    return dtype or torch.get_default_dtype()


def check_shapes(
    k_shape: tuple[int, ...], v_shape: tuple[int, ...], dim: int, sink_size: int, window_size: int
) -> None:
    """Raises InvalidConfig if keys and values do not match each other or the sizes."""
    if len(k_shape) != len(v_shape) or k_shape[:-1] != v_shape[:-1]:
        raise InvalidConfig(f"k_shape {k_shape} and v_shape {v_shape} may differ in the last dimension only")
    for name, shape in (("k_shape", k_shape), ("v_shape", v_shape)):
        if shape[dim] != sink_size + window_size:
            raise InvalidConfig(
                f"{name} has room for {shape[dim]} tokens in dimension {dim}, but sink_size {sink_size} + window_size "
                f"{window_size} = {sink_size + window_size}; make them equal"
            )


def check_chunk(
    name: str, chunk: Shaped[Tensor, "*chunk"], storage: Shaped[Tensor, "*storage"], dim: int, chunk_size: int
) -> None:
    """Raises InvalidChunk if the chunk cannot be written into the storage."""
    shape = (*storage.shape[:dim], chunk_size, *storage.shape[dim + 1 :])
    if not isinstance(chunk, Tensor):
        raise InvalidChunk(f"update got {name} as {type(chunk).__name__}; give a tensor of shape {shape}")
    if chunk.shape != shape:
        raise InvalidChunk(
            f"update got {name} of shape {tuple(chunk.shape)}, not {shape}: exactly chunk_size {chunk_size} tokens in "
            f"dimension {dim}, the rest as in {name}_shape"
        )
    if chunk.dtype != storage.dtype or chunk.device != storage.device:
        raise InvalidChunk(
            f"update got {name} in {chunk.dtype} on {chunk.device}, but the cache is in {storage.dtype} on "
            f"{storage.device}; convert it first, or give the cache another dtype and device"
        )
