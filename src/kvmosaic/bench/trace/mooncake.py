"""Mooncake traces: requests as chains of blocks, equal as far as they share a prefix.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ..., 2353, 2354]}

An id identifies its block and everything before it, so the trace tells prefixes only, and no documents.
Source: https://github.com/kvcache-ai/Mooncake, folder FAST25-release.
"""

from __future__ import annotations

from pathlib import Path

from kvmosaic.bench.trace.json_lines import MAX_PROMPT_TOKENS, Line, json_lines
from kvmosaic.bench.trace.trace import BLOCK_TOKENS, TraceBlock, TraceRequest

_MILLISECOND = 1e-3


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Reads the requests of a file.

    Raises:
        InvalidTrace: no such trace; the message names line and value.
    """
    return [_request(line) for line in json_lines(path)]


def _request(line: Line) -> TraceRequest:
    length = line.whole("input_length", 1, MAX_PROMPT_TOKENS)
    ids = line.ids("hash_ids", line.field("hash_ids", "a list of block ids"))
    if len(ids) != -(-length // BLOCK_TOKENS):
        line.fail(
            f"hash_ids has {len(ids)} blocks for input_length {length}; expected {-(-length // BLOCK_TOKENS)} blocks "
            f"of {BLOCK_TOKENS} tokens"
        )
    blocks = [TraceBlock(number, BLOCK_TOKENS) for number in ids]
    blocks[-1] = TraceBlock(ids[-1], length - BLOCK_TOKENS * (len(ids) - 1))
    return TraceRequest(line.seconds(_MILLISECOND), (), (), tuple(blocks))
