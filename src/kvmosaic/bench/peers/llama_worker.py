"""llama.cpp worker over JSON lines; runs in the environment of llama-cpp-python, and imports nothing of kvmosaic."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

_NUM_SLOTS = 8
"""Maximum number of prompts answered at once; further ones wait."""
_BATCH, _MICRO_BATCH = 2_048, 512
"""Maximum tokens of one call, and maximum computed together in it: the defaults of llama.cpp."""


def main() -> None:
    """Answers requests until its input ends."""
    # library output must not mix with the lines of JSON
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # a half-written copy of the model is deleted
    try:
        engine = LlamaCpp(json.loads(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
    _say(replies, {"version": engine.version})
    for line in sys.stdin:
        message = json.loads(line)
        if "reset" in message:
            engine.reset()
            _say(replies, {})
        else:
            _say(replies, engine.answer(message["prompts"], message["max_tokens"]))


@dataclass(slots=True)
class Running:
    """One prompt and its answer so far, in one slot."""

    slot: int
    tokens: list[int]
    num_prompt: int
    num_stored: int = 0
    """Number of leading tokens whose KV cache is stored."""
    num_reused: int = 0
    first: float = 0.0
    """Time of its first token; seconds after the batch was submitted."""
    last: float = 0.0

    @property
    def num_answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt


class LlamaCpp:
    """One model in one context with a slot per prompt.

    A single prompt reuses the KV cache of the longest common prefix with the previous one, as `Llama.generate` of
    llama-cpp-python does. Several prompts begin without reuse; tokens of answers and of prompts share calls, as they do
    in the server of llama.cpp.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        library: Any = importlib.import_module("llama_cpp")
        self._library = library
        library.llama_backend_init()
        if options["model"].endswith(".gguf"):
            self._model = library.llama_model_load_from_file(options["model"].encode(), self._model_params())
        else:
            self._model = self._written(options)
        if not self._model:
            sys.exit("llama.cpp could not load the model that was written for it")
        self._context = self._new_context(options)
        self._memory = library.llama_get_memory(self._context)
        model = self._model
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        head_size = library.llama_model_n_embd(model) // library.llama_model_n_head(model)
        numbers = 2 * library.llama_model_n_layer(model) * library.llama_model_n_head_kv(model) * head_size
        self._bytes_per_token = numbers * (4 if options["dtype"] == "float32" else 2)
        self._batch = CallBatch(library)
        self._kept: list[int] = []
        """Tokens whose KV cache the first slot holds."""
        self._num_held = 0
        """Tokens of all slots."""
        features = library.llama_print_system_info().decode().replace("CPU :", "").split("|")
        used = ", ".join(feature.split("=")[0].strip() for feature in features if "= 1" in feature)
        self.version = f"{library.__version__} of llama-cpp-python ({used})"

    def _model_params(self) -> Any:
        params = self._library.llama_model_default_params()
        params.use_mmap = False
        return params

    def _written(self, options: dict[str, Any]) -> Any:
        """A folder's model, written as a file of llama.cpp and loaded."""
        write_gguf = importlib.import_module("llama_gguf").write_gguf
        with TemporaryDirectory(prefix="kvmosaic-llama-") as scratch:
            path = Path(scratch, "model.gguf")
            write_gguf(Path(options["model"]), path, options["dtype"])
            return self._library.llama_model_load_from_file(str(path).encode(), self._model_params())

    def reset(self) -> None:
        """Drops the KV cache of earlier prompts."""
        self._library.llama_memory_clear(self._memory, False)
        self._kept, self._num_held = [], 0

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Answers prompts with exactly `max_tokens` tokens each, greedily."""
        begin = time.monotonic()
        ended: list[Running] = []
        for first in range(0, len(prompts), _NUM_SLOTS):
            ended += self._answer_together(prompts[first : first + _NUM_SLOTS], max_tokens, begin)
        seconds = time.monotonic() - begin
        return {
            "seconds": seconds,
            "kv_bytes": self._num_held * self._bytes_per_token,
            "readings": [
                {"first": run.first, "last": run.last, "reused": run.num_reused, "answer": run.tokens[run.num_prompt :]}
                for run in ended
            ],
        }

    def _answer_together(self, prompts: list[list[int]], max_tokens: int, begin: float) -> list[Running]:
        running = [Running(slot, list(prompt), len(prompt)) for slot, prompt in enumerate(prompts)]
        if len(running) == 1:
            self._reuse(running[0])
        else:
            self.reset()
        while unfinished := [run for run in running if run.num_answered < max_tokens]:
            for run, token in self._step(unfinished):
                run.tokens.append(token)
                run.last = time.monotonic() - begin
                run.first = run.first or run.last
        # the last token was sampled and never computed
        self._kept = running[0].tokens[: running[0].num_stored]
        self._num_held = sum(run.num_stored for run in running)
        return running

    def _reuse(self, run: Running) -> None:
        """Truncates the first slot to the prefix in common with the prompt, and empties the others."""
        pairs = zip(self._kept, run.tokens[:-1], strict=False)
        run.num_stored = run.num_reused = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        for slot in range(_NUM_SLOTS):
            self._library.llama_memory_seq_rm(self._memory, slot, run.num_stored if slot == 0 else 0, -1)

    def _step(self, unfinished: list[Running]) -> list[tuple[Running, int]]:
        """Runs one call: decoding answers first, prompts in the remaining tokens. Returns the new tokens."""
        room, rows = _BATCH, list[tuple[Running, int]]()
        self._batch.clear()
        for run in sorted(unfinished, key=lambda run: run.num_answered == 0):
            count = min(room, len(run.tokens) - run.num_stored)
            if not count:
                continue
            room -= count
            end = run.num_stored + count
            self._batch.add(run.slot, run.tokens[run.num_stored : end], run.num_stored, is_last=end == len(run.tokens))
            run.num_stored = end
            if end == len(run.tokens):
                rows.append((run, self._batch.length - 1))
        if code := self._library.llama_decode(self._context, self._batch.content()):
            sys.exit(f"llama_decode returned {code}")
        return [(run, self._most_likely(row)) for run, row in rows]

    def _most_likely(self, row: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _new_context(self, options: dict[str, Any]) -> Any:
        library = self._library
        params = library.llama_context_default_params()
        params.n_ctx = _NUM_SLOTS * options["max_tokens"]
        params.n_seq_max = _NUM_SLOTS
        params.n_batch, params.n_ubatch = _BATCH, _MICRO_BATCH
        params.n_threads = params.n_threads_batch = options["threads"]
        if options["dtype"] == "float32":
            params.type_k = params.type_v = library.GGML_TYPE_F32
        context = library.llama_init_from_model(self._model, params)
        if not context:
            sys.exit(f"llama.cpp could not make a context for {_NUM_SLOTS} prompts of {options['max_tokens']} tokens")
        return context


class CallBatch:
    """The arrays of one call, filled slot by slot."""

    def __init__(self, library: Any) -> None:
        self.length = 0
        self._tokens, self._positions, self._slots = (np.zeros(_BATCH, np.int32) for _ in range(3))
        self._num_slots = np.ones(_BATCH, np.int32)
        self._wants_logits = np.zeros(_BATCH, np.int8)
        # each token points to its list of slots, which here has one
        addresses = self._slots.ctypes.data + np.arange(_BATCH, dtype=np.uint64) * self._slots.itemsize
        self._addresses = addresses.astype(np.uint64)
        self._content = library.llama_batch()
        for name, values in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._num_slots),
            ("seq_id", self._addresses),
            ("logits", self._wants_logits),
        ):
            kind = dict(library.llama_batch._fields_)[name]
            setattr(self._content, name, ctypes.cast(values.ctypes.data, kind))

    def clear(self) -> None:
        """Starts a new call."""
        self.length = 0

    def add(self, slot: int, tokens: list[int], position: int, *, is_last: bool) -> None:
        """Adds consecutive tokens of one slot; requests logits for the last one, if the prompt ends there."""
        end = self.length + len(tokens)
        rows = slice(self.length, end)
        self._tokens[rows] = tokens
        self._positions[rows] = np.arange(position, position + len(tokens))
        self._slots[rows] = slot
        self._wants_logits[rows] = 0
        self._wants_logits[end - 1] = is_last
        self.length = end

    def content(self) -> Any:
        """Returns the arguments of `llama_decode`."""
        self._content.n_tokens = self.length
        return self._content


def _say(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
