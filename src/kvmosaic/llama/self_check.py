"""Self-check: does llama.cpp, on this machine and with this model, give composed what it gives for ordinary prompts?

    joined      system text, one document and question, composed: the same prompt in one piece
    moved       a document that was computed at 0 and is read further on: the same prompt, at 0
    restored    the same, from cells that were saved and loaded again

Each has an ordinary prompt that must give the same logits but for rounding; how much llama.cpp itself rounds is
measured on the same prompt, computed in parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmosaic.attention import Piece, SpanRows
from kvmosaic.engine.self_check import Comparison, SelfCheck, ordinary_tokens
from kvmosaic.llama.library import LlamaContext, Logits, Rows
from kvmosaic.llama.model import LlamaModel
from kvmosaic.llama.runner import LlamaRunner
from kvmosaic.llama.state import pack

_SYSTEM, _DOCUMENT, _QUESTION = 7, 63, 14
_NUM_TOKENS = _SYSTEM + _DOCUMENT + _QUESTION
_DISTANCE = 37
_PART = 7
_LEAST, _FACTOR = 0.02, 4.0
"""Allowed: so much of the deviation of the logits, or so many times llama.cpp's own rounding. Wrong is about 1."""
_LEAST_MOVED = {"q8_0": 0.1, "bf16": 0.1}
"""Keys of few bits are rounded once more when they are moved."""


def check_llama(model: LlamaModel, *, num_threads: int) -> SelfCheck:
    """Runs the check: seven forwards, some 500 rows in all."""
    if model.immovable_reason:
        return SelfCheck((), False, f"documents cannot be composed in llama.cpp: {model.immovable_reason}")
    needed = _NUM_TOKENS + _DISTANCE + 1
    if model.max_positions < needed:
        return SelfCheck((), False, f"the check needs {needed} positions, this model has {model.max_positions}")
    tokens = ordinary_tokens(model.tokenizer, model.vocab_size, _NUM_TOKENS)
    try:
        whole, parts = _ordinary(model, tokens, num_threads)
        without_system, _ = _ordinary(model, tokens[_SYSTEM:], num_threads)
        composed = _composed(model, tokens, num_threads)
        limit = max(_LEAST, _FACTOR * _difference(parts, whole))
        moved = _difference(composed[1], without_system)
        limit_of_moved = max(limit, _LEAST_MOVED.get(model.cache_type, 0.0))
        findings = [
            Comparison("a composed prompt", "the same prompt in one piece", _difference(composed[0], whole), limit),
            Comparison("a moved document", "the same one unmoved", moved, limit_of_moved),
            Comparison("a restored document", "the same one computed", _difference(composed[2], whole), limit),
        ]
    except Exception as error:  # a failure here would also fail in an answer
        return SelfCheck((), model.is_movable, f"{type(error).__name__}: {error}")
    return SelfCheck(tuple(findings), is_moved=True)


def _ordinary(model: LlamaModel, tokens: Sequence[int], num_threads: int) -> tuple[Logits, Logits]:
    """Logits of an ordinary prompt's question, computed in one forward, and in many."""
    context = _context(model, num_threads)
    try:
        last = len(tokens) - _QUESTION
        whole = context.forward([Rows(tokens, 0, 0, _QUESTION)]).copy()
        context.untag(0)
        parts = [
            context.forward([Rows(tokens[first : first + _PART], first, 0, _PART if first >= last else 0)]).copy()
            for first in range(0, len(tokens), _PART)
        ]
        return whole, np.concatenate(parts)
    finally:
        context.close()


def _context(model: LlamaModel, num_threads: int) -> LlamaContext:
    return model.file.context(
        num_cells=2 * _NUM_TOKENS, num_sequences=1, num_threads=num_threads, cache_type=model.cache_type
    )


def _composed(model: LlamaModel, tokens: Sequence[int], num_threads: int) -> tuple[Logits, Logits, Logits]:
    """Logits of the question: over a document after a system text, over a moved one, and over a restored one."""
    block_size = _NUM_TOKENS
    runner = LlamaRunner(
        model,
        {"request": 4, "chunk_cache": 3},
        block_size,
        max_moved=_NUM_TOKENS,
        num_threads=num_threads,
        num_sequences=16,
    )
    system, document = tokens[:_SYSTEM], tokens[_SYSTEM : _SYSTEM + _DOCUMENT]
    question = tokens[-_QUESTION:]

    def slots(block: int, count: int) -> range:
        return range(block * block_size, block * block_size + count)

    def ask(block: int, position: int, *reads: Piece) -> Logits:
        rows = SpanRows(question, position, "request", slots(block, _QUESTION), reads, num_logits=_QUESTION)
        return runner.run([rows]).copy()

    try:
        shown = Piece("request", 0, _SYSTEM, 0)
        runner.run(
            [
                SpanRows(system, 0, "request", slots(0, _SYSTEM), ()),
                SpanRows(document, _SYSTEM, "chunk_cache", slots(0, _DOCUMENT), (shown,)),
                SpanRows(document, 0, "chunk_cache", slots(1, _DOCUMENT), ()),
            ]
        )
        after_system = Piece("chunk_cache", 0, _DOCUMENT, _SYSTEM)
        moved = Piece("chunk_cache", block_size, _DOCUMENT, _DISTANCE, _DISTANCE)
        computed, restored_slots = (runner.slots_of("chunk_cache", block)[:_DOCUMENT] for block in (0, 2))
        state = runner.cells.read(computed)
        runner.cells.load(restored_slots, state.positions, pack(state))
        restored = Piece("chunk_cache", 2 * block_size, _DOCUMENT, _SYSTEM)
        return (
            ask(1, _SYSTEM + _DOCUMENT, shown, after_system),
            ask(2, _DISTANCE + _DOCUMENT, moved),
            ask(3, _SYSTEM + _DOCUMENT, shown, restored),
        )
    finally:
        runner.close()


def _difference(found: Logits, expected: Logits) -> float:
    """Root mean square difference of logits, as a share of their deviation."""
    return float(np.sqrt(np.square(found - expected).mean()) / expected.std())
