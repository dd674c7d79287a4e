"""Files of traces: both formats, and what is wrong with a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.bench.trace.trace import MAX_LINE_BYTES, read_trace
from kvmosaic.errors import InvalidTrace

EXCERPT = Path(__file__).parent / "traces" / "ragpulse"
GOOD = {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}


def mooncake(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_of_ragpulse_and_its_file_are_one_trace() -> None:
    trace = read_trace(EXCERPT)
    assert trace == read_trace(EXCERPT / "0_trace.jsonl")
    assert (trace.name, trace.format, len(trace.requests)) == ("ragpulse", "ragpulse", 400)
    first = trace.requests[0]
    assert [block.num_tokens for block in first.system] == [512, 512, 437]
    assert len(first.documents) == 6 and first.num_tokens > 2_500
    assert all(len(request.documents) <= 7 for request in trace.requests)


def test_requests_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    rows = [{**GOOD, "timestamp": time, "hash_ids": [time, 0]} for time in (3_000, 1_000, 2_000)]
    trace = read_trace(mooncake(tmp_path / "mixed.jsonl", *rows))
    assert [request.seconds for request in trace.requests] == [1.0, 2.0, 3.0]
    assert [request.rest[0].id for request in trace.first(2).requests] == [1_000, 2_000]


def test_the_last_block_of_mooncake_is_as_long_as_the_rest_of_the_prompt(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "talk.jsonl", GOOD))
    assert (trace.name, trace.format, trace.has_documents) == ("talk", "mooncake", False)
    assert [(block.id, block.num_tokens) for block in trace.requests[0].rest] == [(46, 512), (47, 88)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hash_ids": [1]}, "line 2: hash_ids has 1 blocks for input_length 600; expected 2 blocks of 512 tokens"),
        ({"hash_ids": [1, -1]}, "line 2: hash_ids has the block id -1; expected a whole number from 0"),
        ({"hash_ids": [1, True]}, "line 2: hash_ids has the block id True"),
        ({"hash_ids": "46"}, "line 2: hash_ids is '46'; expected a list"),
        ({"input_length": 0}, "line 2: input_length is 0; expected a whole number from 1"),
        ({"input_length": 10**9}, "line 2: input_length is 1000000000"),
        ({"timestamp": "soon"}, "line 2: timestamp is 'soon'; expected a number"),
        ({"timestamp": -1}, "line 2: timestamp is -1"),
        ({"timestamp": None}, "line 2: timestamp is None"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTrace) as caught:
        read_trace(mooncake(tmp_path / "wrong.jsonl", GOOD, {**GOOD, **changed}))
    assert message in str(caught.value) and "wrong.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected one request per line"),
        (b"[1, 2]\n", r"line 1: '\[1, 2\]' is no JSON object"),
        (b"\xff\xfe\n", "line 1: .* is no JSON object"),
        (b'{"hash_ids": ' + b"[" * 100_000 + b"\n", "is no JSON object"),
        (b'{"hash_ids": [' + b"1" * 10_000 + b"]}\n", "is no JSON object"),
        (b'{"hash_ids": [' + b" " * MAX_LINE_BYTES + b"]}\n", f"line 1: it is longer than {MAX_LINE_BYTES} bytes"),
        (b'{"timestamp": 1}\n', "line 1: 'hash_ids' is missing"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "no.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidTrace, match=message):
        read_trace(path)


def test_a_missing_file_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="--trace takes a folder of RAGPulse"):
        read_trace(tmp_path / "no.jsonl")
    with pytest.raises(InvalidTrace, match=r"has no 0_trace\.jsonl"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("file", "row", "message"),
    [
        ("2_passages.jsonl", None, "2_passages.jsonl is missing beside 0_trace.jsonl"),
        ("2_passages.jsonl", {"passage_id": 0}, "line 1: 'token_length' is missing"),
        ("2_passages.jsonl", {"passage_id": 10**7, "token_length": 0}, "line 1: token_length is 0; expected"),
        ("2_passages.jsonl", {"passage_id": 0, "token_length": 7}, "line 1: block 0 has 7 tokens here and 512 before"),
        ("5_web_search.jsonl", {"web_search_id": 1.5, "token_length": 1}, "line 1: web_search_id is 1.5"),
        ("2_passages.jsonl", {"passage_id": 10**7, "token_length": 9}, r"passages_ids has the block id \d+, which no"),
        ("0_trace.jsonl", {"timestamp": "1", "hash_ids": {}}, "line 1: the request has no question"),
        ("0_trace.jsonl", {"timestamp": "1", "hash_ids": 7}, "line 1: hash_ids is 7; expected an object"),
        ("0_trace.jsonl", {"timestamp": "1", "hash_ids": {"history": 7}}, "line 1: history is 7; expected a list"),
    ],
)
def test_a_wrong_file_of_ragpulse_is_named(tmp_path: Path, file: str, row: object, message: str) -> None:
    folder = Path(shutil.copytree(EXCERPT, tmp_path / "trace"))
    if row is None:
        (folder / file).unlink()
    else:
        mooncake(folder / file, row)
    with pytest.raises(InvalidTrace, match=message):
        read_trace(folder)
