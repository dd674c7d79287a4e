from __future__ import annotations

import io

from rich.console import Console

from kvmosaic.console.reuse import reuse_strip, reuse_table
from kvmosaic.console.text import duration_text, size_text
from kvmosaic.sampling import ReuseReport, SegmentReuse

SYSTEM = SegmentReuse("system", 12, "reused", reused_tokens=12, milliseconds=0.1)
FERRY = SegmentReuse("chunk", 84, "moved", name="ferry", distance=131, reused_tokens=84, milliseconds=0.1)
QUESTION = SegmentReuse("question", 40, "partly reused", reused_tokens=32, milliseconds=1200)


def printed(what: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(what)
    return console.file.getvalue()


def test_table_says_what_happened_to_each_segment_and_to_the_whole() -> None:
    report = ReuseReport((SYSTEM, FERRY, QUESTION), time_to_first_token=0.035, composition="documents are context-free")
    lines = [line.split() for line in printed(reuse_table(report)).splitlines()]
    assert lines[1] == ["system", "12", "reused", "0.10", "ms"]
    assert lines[2] == ["ferry", "84", "moved", "+131", "0.10", "ms"]
    assert lines[3] == ["question", "40", "32", "reused,", "8", "computed", "1.20", "s"]
    assert " ".join(lines[4]) == "128 of 136 tokens reused (94%), 8 computed; first token after 35 ms"
    assert lines[5] == ["documents", "are", "context-free"]


def test_partly_reused_segment_is_two_bars() -> None:
    assert [(bar.num_tokens, bar.action) for bar in reuse_strip(ReuseReport((QUESTION,))).bars] == [
        (32, "reused"),
        (8, "computed"),
    ]


def test_long_tables_are_cut_before_the_question() -> None:
    lines = printed(reuse_table(ReuseReport((*[FERRY] * 100, QUESTION)))).splitlines()
    assert len(lines) < 30
    assert "… 77 more" in lines[24] and "6,468 tokens reused" in lines[24]
    assert lines[25].startswith("question")


def test_unknown_times_are_a_dash() -> None:
    assert printed(reuse_table(ReuseReport())).rstrip().endswith("first token after –")


def test_sizes_and_durations_are_short() -> None:
    assert [size_text(count) for count in (0, 640, 2560, 2**31, 1016 * 2**20)] == [
        "0 B",
        "640 B",
        "2.5 KiB",
        "2 GiB",
        "1,016 MiB",
    ]
    assert [duration_text(seconds) for seconds in (0.00042, 0.0351, 1.236)] == ["0.42 ms", "35 ms", "1.24 s"]
