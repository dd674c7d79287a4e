"""Files, contexts and forwards of llama.cpp."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmosaic.errors import EngineStopped, ModelError, UnsupportedModel
from kvmosaic.llama.interface import Batch, MetadataOverride, bindings, messages_of_llama
from kvmosaic.llama.state import LayerRows, SavedState, SequenceState, joined, narrowed, pack, parse, split, widened

Logits: TypeAlias = NDArray[np.float32]
"""[R, V]."""
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8}
"""Types of cached keys and values, and their numbers in ggml."""
_LAYER_NOTE = re.compile(r"layer\s+\d+ assigned to device .*is_swa = ([01])")
_ROOM_AROUND = 16
"""For tokens around a text; inside, there are no more tokens than bytes."""
_SHIFT_CELLS, _SHIFT_SEQUENCES = 1024, 31
"""Size of the context that moves documents."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive tokens of one sequence in a forward."""

    token_ids: Sequence[int]
    position: int
    sequence: int
    num_logits: int = 0
    """Number of tokens at the end that need logits."""


@dataclass(frozen=True, slots=True)
class ShiftFaults:
    """What llama.cpp's shift does to keys besides turning them; for each memory and layer."""

    unrotated: tuple[tuple[bool, ...], ...] = ()
    """Whether the model computes keys without a rotation: llama.cpp turns them, too. (): none."""
    scales: tuple[tuple[NDArray[np.float32], ...], ...] = ()
    """By what each number of a key is multiplied: a rotation that also scales (YaRN) does so again. (): by 1."""

    def mended(self, moved: SequenceState, before: SequenceState) -> SequenceState:
        """The moved cells with the keys that they should have."""
        memories = list(moved.memories)
        for index, scales in enumerate(self.scales):
            keys = zip(memories[index].keys, scales, strict=True)
            memories[index] = replace(memories[index], keys=tuple(_divided(key, scale) for key, scale in keys))
        for index, layers in enumerate(self.unrotated):
            pairs = zip(memories[index].keys, before.memories[index].keys, layers, strict=True)
            keys_now = tuple(old if is_kept else new for new, old, is_kept in pairs)
            memories[index] = replace(memories[index], keys=keys_now)
        return SequenceState(moved.header, tuple(memories))


NO_FAULTS = ShiftFaults()


def _divided(key: LayerRows, scale: NDArray[np.float32]) -> LayerRows:
    return replace(key, rows=(key.rows.view(np.float32) / scale).view(np.uint8))


class LlamaFile:
    """A GGUF file loaded by llama.cpp."""

    def __init__(self, path: Path, *, gpu_layers: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """Loads it.

        Args:
            path: of the file.
            gpu_layers: number of layers on a GPU; negative: all.
            entries: what to read instead of the file's own entries.

        Raises:
            UnsupportedModel: llama.cpp is missing, or cannot load the file.
        """
        library = bindings()
        params = library.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        named = [MetadataOverride(0, key.encode(), value) for key, value in (entries or {}).items()]
        overrides = (MetadataOverride * (len(named) + 1))(*named)  # one with an empty key ends them
        params.kv_overrides = ctypes.addressof(overrides)
        with messages_of_llama() as messages:
            self._model = library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            errors = [message.text for message in messages if message.is_error]
            reason = errors[0].rpartition("error loading model: ")[2] if errors else "it does not say why"
            raise UnsupportedModel(
                f"llama.cpp cannot load {path}: {reason:.300}; give another file, or take engine='transformers', which "
                "dequantizes it"
            )
        self.path = path
        self.is_on_gpu = bool(gpu_layers and library.llama_supports_gpu_offload())
        self.vocab_size: int = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self.max_positions: int = library.llama_model_n_ctx_train(self._model)
        self.num_kv_heads: int = library.llama_model_n_head_kv(self._model)
        self.num_parameters: int = library.llama_model_n_params(self._model)
        self.num_bytes: int = library.llama_model_size(self._model)
        self.is_recurrent = bool(
            library.llama_model_is_recurrent(self._model) or library.llama_model_is_hybrid(self._model)
        )
        self.has_encoder = bool(library.llama_model_has_encoder(self._model))
        self.window: int = library.llama_model_n_swa(self._model)
        self.rope_type: int = library.llama_model_rope_type(self._model)
        said = [found for message in messages if (found := _LAYER_NOTE.search(message.text))]
        self.window_layers = tuple(found[1] == "1" for found in said[: library.llama_model_n_layer(self._model)])
        """Whether each layer has a sliding window, as llama.cpp says when it loads them."""
        self.shift_faults = NO_FAULTS
        self.architecture, _, size_and_type = _text(library.llama_model_desc, self._model).partition(" ")
        self.weight_type = size_and_type.partition(" ")[2].removeprefix("(guessed) ")
        """Of most weights, as llama.cpp names it: "Q4_1", "Q4_K - Medium"."""

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text and those around it, as the file says; control tokens may be written in it."""
        library, content = bindings(), text.encode()
        buffer = (ctypes.c_int32 * (len(content) + _ROOM_AROUND))()
        vocab = library.llama_model_get_vocab(self._model)
        count = library.llama_tokenize(vocab, content, len(content), buffer, len(buffer), True, True)
        return list(buffer[:count])

    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        library = bindings()
        vocab = library.llama_model_get_vocab(self._model)
        return tuple(token for token in range(self.vocab_size) if library.llama_vocab_is_eog(vocab, token))

    def close(self) -> None:
        """Frees it; calling it again is safe."""
        if self._model:
            bindings().llama_model_free(self._model)
            self._model = None

    def context(
        self,
        *,
        num_cells: int,
        num_sequences: int,
        num_threads: int,
        max_rows: int = 2048,
        cache_type: str = "f16",
    ) -> LlamaContext:
        """A context with one memory for all sequences, whose keys and values have this type.

        Raises:
            ModelError: llama.cpp cannot allocate it.
        """
        library = bindings()
        params = library.llama_context_default_params()
        params.n_ctx = num_cells
        params.n_seq_max = num_sequences + 1  # one for padding
        params.n_batch = max(max_rows, params.n_seq_max)  # its own check: a row of logits for every sequence
        params.n_ubatch = max(min(max_rows, 512), params.n_seq_max)
        params.kv_unified = True
        params.flash_attn_type = 1
        params.type_k = params.type_v = CACHE_TYPES[cache_type]
        params.swa_full = True
        params.n_threads = params.n_threads_batch = num_threads
        params.no_perf = True
        context = library.llama_init_from_model(self._model, params)
        if not context:
            raise ModelError(f"llama.cpp cannot create a context of {num_cells} tokens; make the caches smaller")
        open_shifter = partial(self._shifter, num_threads, cache_type)
        return LlamaContext(context, self.vocab_size, num_sequences, max_rows, open_shifter)

    def _shifter(self, num_threads: int, cache_type: str) -> Shifter:
        is_wide = cache_type == "bf16" or (cache_type == "f16" and bool(self.shift_faults.scales))
        return Shifter(
            self.context(
                num_cells=_SHIFT_CELLS + 1,
                num_sequences=_SHIFT_SEQUENCES + 1,
                num_threads=num_threads,
                max_rows=1,
                cache_type="f32" if is_wide else cache_type,
            ),
            self.shift_faults,
            CACHE_TYPES[cache_type] if is_wide else None,
        )


class _Batch:
    """A `llama_batch` of at most so many rows, each of one sequence."""

    def __init__(self, max_rows: int) -> None:
        self._tokens, self._positions, self._sequences = (np.zeros(max_rows, np.int32) for _ in range(3))
        self._counts = np.ones(max_rows, np.int32)
        self._has_logits = np.zeros(max_rows, np.int8)
        first = self._sequences.ctypes.data
        self._pointers = np.arange(first, first + 4 * max_rows, 4, dtype=np.uintp)
        arrays = (self._tokens, self._positions, self._counts, self._pointers, self._has_logits)
        token, pos, n_seq_id, seq_id, logits = (array.ctypes.data for array in arrays)
        self._batch = Batch(0, token, None, pos, n_seq_id, seq_id, logits)

    def filled(self, groups: Sequence[Rows]) -> Batch:
        """The batch with these rows, until it is filled again."""
        row = 0
        for rows in groups:
            last = row + len(rows.token_ids)
            self._tokens[row:last] = rows.token_ids
            self._positions[row:last] = np.arange(rows.position, rows.position + last - row)
            self._sequences[row:last] = rows.sequence
            self._has_logits[row:last] = False
            self._has_logits[last - rows.num_logits : last] = True
            row = last
        self._batch.n_tokens = row
        return self._batch


class LlamaContext:
    """A context: forwards, and the memory of its sequences; ranges of positions are [first, last)."""

    def __init__(
        self, context: Any, vocab_size: int, num_sequences: int, max_rows: int, open_shifter: Callable[[], Shifter]
    ) -> None:
        self._library = bindings()
        self._context: Any = context
        self._memory = self._library.llama_get_memory(context)
        self._batch = _Batch(max_rows)
        self._vocab_size = vocab_size
        self._open_shifter = open_shifter
        self._shifter: Shifter | None = None
        self.num_sequences = num_sequences
        self.max_rows = max_rows

    def close(self) -> None:
        """Frees it; calling it again is safe."""
        if self._shifter is not None:
            self._shifter.close()
            self._shifter = None
        if self._context is not None:
            self._library.llama_free(self._context)
            self._context = None

    def forward(self, groups: Sequence[Rows], padding: int = 0) -> Logits:
        """Computes the keys and values of some rows, all of which see what their sequence has at earlier positions.

        Args:
            groups: the rows.
            padding: number of further rows, whose cells are free again afterwards.

        Returns:
            [R, V] logits in float32, of the requested rows in order; llama.cpp's own, until the next forward.

        Raises:
            ModelError: llama.cpp failed; none of the rows' cells exist.
        """
        spare = (Rows([0] * padding, 0, self.num_sequences),) if padding else ()
        batch = self._batch.filled((*groups, *spare))
        code = self._library.llama_decode(self._context, batch)
        if padding:
            self.untag(self.num_sequences)
        if code:
            for rows in groups:
                self.untag(rows.sequence, rows.position)
            raise ModelError(f"llama.cpp failed with code {code} in a forward of {batch.n_tokens} tokens")
        num_logits = sum(rows.num_logits for rows in groups)
        if not num_logits:
            return np.empty((0, self._vocab_size), np.float32)
        numbers = ctypes.c_float * (num_logits * self._vocab_size)
        found = numbers.from_address(self._library.llama_get_logits(self._context))
        return np.ctypeslib.as_array(found).reshape(num_logits, self._vocab_size)

    def tag(self, source: int, target: int, first: int, last: int) -> None:
        """Adds `target` to the sequences of the cells of `source` in a range."""
        self._library.llama_memory_seq_cp(self._memory, source, target, first, last)

    def untag(self, sequence: int, first: int = 0, last: int = -1) -> None:
        """Removes a sequence from its cells in a range; -1: to its end. Cells without a sequence are free."""
        self._library.llama_memory_seq_rm(self._memory, sequence, first, last)

    def shifted(self, states: Sequence[tuple[SequenceState, int]]) -> list[SequenceState]:
        """Returns saved sequences, each moved by a distance: other positions, and keys rotated for them.

        A small context does it: one in which any cell moves rotates all that it has.
        """
        if self._shifter is None:
            self._shifter = self._open_shifter()
        return self._shifter.shifted(states)

    @property
    def can_shift(self) -> bool:
        """Whether keys can be moved; where not, llama.cpp ends the process when they are."""
        return bool(self._library.llama_memory_can_shift(self._memory))

    def shift(self, sequence: int, distance: int) -> None:
        """Moves the cells of a sequence; their keys are rotated before the next forward."""
        if distance:
            self._library.llama_memory_seq_add(self._memory, sequence, 0, -1, distance)

    def save(self, sequence: int) -> bytearray:
        """Returns the cells of a sequence: positions, keys and values."""
        if self._context is None:
            raise EngineStopped("the context of llama.cpp is closed")
        size = self._library.llama_state_seq_get_size(self._context, sequence)
        state = bytearray(size)
        written = self._library.llama_state_seq_get_data(self._context, _address(state), size, sequence)
        if written != size:
            raise ModelError(f"llama.cpp saved {written} of {size} bytes of a sequence")
        return state

    def load(self, sequence: int, state: SavedState) -> None:
        """Writes saved cells into free ones, for an empty sequence."""
        read = self._library.llama_state_seq_set_data(self._context, _address(state), len(state), sequence)
        if read != len(state):
            raise ModelError(f"llama.cpp loaded {read} of {len(state)} bytes of a sequence")


class Shifter:
    """Moves saved sequences: a small context loads them, shifts them before a forward of one token, and saves them.

    llama.cpp ends the process when it has to rotate keys in bfloat16: they are float32 here.
    """

    def __init__(self, context: LlamaContext, faults: ShiftFaults, kind: int | None = None) -> None:
        """Takes over a context.

        Args:
            context: empty, and closed with this.
            faults: what is put right after each shift.
            kind: type of the keys and values, if the context has them in float32.
        """
        self._context = context
        self._faults = faults
        self._kind = kind

    def close(self) -> None:
        """Frees its context."""
        self._context.close()

    def shifted(self, states: Sequence[tuple[SequenceState, int]]) -> list[SequenceState]:
        """Each saved sequence moved by its distance."""
        parts = [
            (number, part, distance)
            for number, (state, distance) in enumerate(states)
            for part in split(state if self._kind is None else widened(state), _SHIFT_CELLS)
        ]
        found: list[list[SequenceState]] = [[] for _ in states]
        while parts:
            batch: list[tuple[int, SequenceState, int]] = []
            room = _SHIFT_CELLS
            while parts and len(batch) < _SHIFT_SEQUENCES and len(parts[0][1].positions) <= room:
                room -= len(parts[0][1].positions)
                batch.append(parts.pop(0))
            moved = self._shift([(pack(part), distance) for _, part, distance in batch])
            for (number, part, _), state in zip(batch, moved, strict=True):
                found[number].append(self._faults.mended(parse(state), part))
        whole = [joined(each) for each in found]
        return [state if self._kind is None else narrowed(state, self._kind) for state in whole]

    def _shift(self, states: Sequence[tuple[bytes, int]]) -> list[bytearray]:
        context = self._context
        try:
            for sequence, (state, distance) in enumerate(states, 1):
                context.load(sequence, state)
                context.shift(sequence, distance)
            context.forward([Rows([0], 0, 0)])
            return [context.save(sequence) for sequence in range(1, len(states) + 1)]
        finally:
            for sequence in range(len(states) + 1):
                context.untag(sequence)


def _address(state: SavedState) -> int:
    return np.frombuffer(state, np.uint8).ctypes.data


def _text(function: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(256)
    function(*arguments, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")
