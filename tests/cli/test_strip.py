from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvmosaic.console.reuse import Badge, Bar, Strip, bar_widths
from kvmosaic.console.text import one_line, printable

BARS = [
    Bar("system", 12, "reused"),
    Bar("ferry", 84, "moved", 131),
    Bar("kiln", 40, "computed"),
    Bar("question", 9, "computed"),
]


def drawn(strip: Strip, width: int = 80, **options: object) -> list[str]:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(strip)
    return console.file.getvalue().splitlines()


def test_strip_without_colour_tells_the_actions_apart_by_pattern_and_sign() -> None:
    names, bars, figures, legend = drawn(Strip(BARS), no_color=True)
    assert names.split() == ["=", "system", "→", "ferry", "+", "kiln", "+", "question"]
    assert [set(bar) for bar in bars.split()] == [{"█"}, {"▓"}, {"░"}, {"░"}]
    assert figures.split() == ["12", "84", "+131", "40", "9"]
    assert "██ = reused" in legend and "▓▓ → moved" in legend and "░░ + computed" in legend


def test_strip_with_colour_writes_the_names_into_coloured_fields() -> None:
    lines = drawn(Strip(BARS), force_terminal=True, color_system="truecolor")
    assert len(lines) == 3
    assert "\x1b[38;2;16;16;16;48;2;98;170;219m → ferry" in lines[0]


def test_16_colours_tell_the_actions_apart() -> None:
    names, _, legend = drawn(Strip(BARS), force_terminal=True, color_system="standard")
    backgrounds = ("42m = system", "44m → ferry", "43m + kiln")
    assert all(background in names for background in backgrounds)
    assert all(background in legend for background in ("42m = ", "44m → ", "43m + "))


def test_fields_of_tables_have_the_colours_of_the_strip() -> None:
    for color_system, background in (("standard", ";44m moved "), ("truecolor", ";48;2;98;170;219m moved ")):
        console = Console(file=io.StringIO(), force_terminal=True, color_system=color_system)
        console.print(Badge("moved", "moved"))
        assert background in console.file.getvalue()


def test_legend_breaks_between_its_parts() -> None:
    lines = drawn(Strip(BARS[:1]), width=60, no_color=True)
    assert lines[-2:] == ["██ = reused   ▓▓ → moved   ░░ + computed", "below: tokens and distance"]


def test_strip_in_a_file_has_no_escape_sequences() -> None:
    assert not any("\x1b" in line for line in drawn(Strip(BARS)))


def test_longer_segments_get_wider_bars() -> None:
    system, ferry, kiln, question = (len(bar) for bar in drawn(Strip(BARS), no_color=True)[1].split())
    assert ferry > kiln > system >= question


def test_many_segments_wrap_and_none_is_lost() -> None:
    lines = drawn(Strip([Bar(f"doc{index}", 10, "reused") for index in range(40)]), no_color=True)
    assert sum(line.count("doc") for line in lines) == 40
    assert all(len(line) <= 80 for line in lines)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=50), st.integers(20, 200))
def test_bars_fit_the_console(tokens: list[int], width: int) -> None:
    widths = bar_widths(tokens, width)
    assert min(widths) >= min(9, width)
    assert sum(widths) <= width or set(widths) == {min(12, width)}


def test_names_cannot_steer_the_terminal() -> None:
    (names, *_) = drawn(Strip([Bar("\x1b[2Jgone\u202e", 9, "computed")]), no_color=True)
    assert "\x1b" not in names and "\u202e" not in names and "gone" in names


def test_printable_keeps_text_and_marks_control_characters() -> None:
    assert printable("Łódź\t1\n2") == "Łódź\t1\n2"
    assert printable("a\x07b\x9bc") == "a\ufffdb\ufffdc"


def test_one_line_shortens_and_joins_lines() -> None:
    assert one_line("where \n does  it go?") == "where does it go?"
    assert one_line("x" * 50, 10) == "x" * 9 + "…"


def test_a_thousand_segments_are_cut_before_the_last_one() -> None:
    lines = drawn(Strip([*(Bar(f"doc{index}", 10, "reused") for index in range(1000)), Bar("question", 9, "computed")]))
    assert len(lines) < 40
    assert "953 segments before the last one are not drawn" in lines
    assert any("question" in line for line in lines)
