"""RAGPulse traces: requests of a help desk, each with system text, passages, history, web results and question.

    0_trace.jsonl         {"timestamp": "82", "hash_ids": {"sys_prompt": [..], "passages_ids": [..], "history": [..],
                           "web_search": [..], "user_input": [..]}, ...}
    1_sys_prompt.jsonl    {"sys_prompt_id": 8302, "token_length": 512}        and 2 to 5 for the other parts

Source: https://github.com/flashserve/RAGPulse (arXiv 2511.12979).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvmosaic.bench.trace.json_lines import MAX_BLOCK_TOKENS, MAX_ID, MAX_PROMPT_TOKENS, Line, json_lines
from kvmosaic.bench.trace.trace import TraceBlock, TraceRequest
from kvmosaic.errors import InvalidTrace

REQUESTS = "0_trace.jsonl"
_LENGTHS = {
    "1_sys_prompt.jsonl": "sys_prompt_id",
    "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id",
    "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}
"""The files with the lengths of blocks, and their field with the id."""
_REST = ("history", "web_search", "user_input")


def read_ragpulse(path: Path) -> list[TraceRequest]:
    """Reads the requests of a file; those with the lengths of its blocks are in the same folder.

    Raises:
        InvalidTrace: a file that is missing or is no such trace; the message names file, line and value.
    """
    blocks: dict[int, TraceBlock] = {}
    for name, field in _LENGTHS.items():
        beside = path.parent / name
        if not beside.is_file():
            raise InvalidTrace(
                f"{name} is missing beside {path.name}; a RAGPulse trace has {', '.join((REQUESTS, *_LENGTHS))}"
            )
        for line in json_lines(beside):
            number = line.whole(field, 0, MAX_ID)
            length = line.whole("token_length", 1, MAX_BLOCK_TOKENS)
            if blocks.setdefault(number, TraceBlock(number, length)).num_tokens != length:
                line.fail(f"block {number} has {length} tokens here and {blocks[number].num_tokens} before")
    return [_request(line, blocks) for line in json_lines(path)]


def _request(line: Line, blocks: Mapping[int, TraceBlock]) -> TraceRequest:
    parts = line.field("hash_ids", "the blocks of the request by part")
    if not isinstance(parts, dict):
        line.fail(f"hash_ids is {parts!r:.80}; expected an object with sys_prompt, passages_ids and so on")
    rest = tuple(block for name in _REST for block in _part(line, parts, name, blocks))
    request = TraceRequest(
        line.seconds(1.0),
        _part(line, parts, "sys_prompt", blocks),
        _part(line, parts, "passages_ids", blocks),
        rest,
    )
    if not rest:
        line.fail(f"the request has no question; expected blocks in one of {', '.join(_REST)}")
    if request.num_tokens > MAX_PROMPT_TOKENS:
        line.fail(f"the prompt has {request.num_tokens} tokens; at most {MAX_PROMPT_TOKENS} can be replayed")
    return request


def _part(
    line: Line, parts: Mapping[str, object], name: str, blocks: Mapping[int, TraceBlock]
) -> tuple[TraceBlock, ...]:
    ids = line.ids(name, parts.get(name, []))
    missing = next((number for number in ids if number not in blocks), None)
    if missing is not None:
        line.fail(f"{name} has the block id {missing}, which no file of lengths has; are the files of one version?")
    return tuple(blocks[number] for number in ids)
