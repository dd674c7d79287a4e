from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from kvmosaic.cli import _show_note, app
from kvmosaic.console.prompt_source import PromptSource, split_input
from kvmosaic.errors import InvalidPrompt
from kvmosaic.model.cpu.prepack import has_onednn_for_bfloat16


def run(*arguments: str | Path, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def test_run_answers_every_question_about_the_folder(tiny_model: Path, notes: Path) -> None:
    options = ("--max-tokens", "4", "--repair", "none", "--position-strategy", "shared")
    result = run("run", tiny_model, "--documents", notes, "-q", "Where?", "-q", "Who?", *options)
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if line.startswith("Q ")] == ["Q  Where?", "Q  Who?"]
    assert len(re.findall(r"(?:ferry.txt|kiln.md|mill.htm) +\d+ +reused", result.stdout)) == 6
    assert result.stderr.lstrip().startswith("read 3 documents in")


def test_run_prints_one_json_object_per_line(tiny_model: Path) -> None:
    lines = "Answer. ## A red kiln. ## Why?\nAnswer. ## A red kiln. ## How?\n"
    result = run("run", tiny_model, "-", "--chunk-separator", "##", "--json", "--max-tokens", "2", text=lines)
    cold, warm = (json.loads(line) for line in result.stdout.splitlines())
    assert [cold["question"], warm["question"]] == ["Why?", "How?"]
    assert [segment["action"] for segment in cold["reuse"]["segments"]] == ["computed"] * 3
    assert [segment["action"] for segment in warm["reuse"]["segments"]] == ["reused", "reused", "computed"]
    assert warm["finish_reason"] == "length" and len(warm["token_ids"]) == 2


def test_sequential_documents_are_moved(tiny_model: Path, notes: Path) -> None:
    options = ("--position-strategy", "sequential", "--chunk-context", "system", "--repair", "none", "--json")
    segments = json.loads(run("run", tiny_model, "--documents", notes, "-q", "Where?", *options).stdout)["reuse"][
        "segments"
    ]
    assert [segment["action"] for segment in segments] == ["reused", "moved", "moved", "computed"]
    assert segments[2]["distance"] == segments[0]["num_tokens"] + segments[1]["num_tokens"]


def test_run_without_chunk_cache_says_so(tiny_model: Path, notes: Path) -> None:
    result = run(
        "run", tiny_model, "--documents", notes, "-q", "Where?", "--no-enable-chunk-cache", "--max-tokens", "1"
    )
    assert result.exit_code == 0
    assert "not composed: switched off" in " ".join(result.stdout.split())


def test_other_separators_split_the_prompt(tiny_model: Path) -> None:
    result = run("run", tiny_model, "a # # b # # c", "--chunk-separator", " # # ", "--max-tokens", "1", "--json")
    assert len(json.loads(result.stdout)["reuse"]["segments"]) == 3


def test_plan_computes_nothing_and_shows_places_and_memory(tiny_model: Path, notes: Path) -> None:
    asked = ("plan", tiny_model, "--documents", notes, "-q", "Where?", "--system", "Answer.")
    result = run(*asked, "--position-strategy", "sequential", "--chunk-context", "system")
    assert result.exit_code == 0, result.output
    assert re.search(r"^kiln\.md +42 +7 +46 +\+39 +12 KiB +compute", result.stdout, re.MULTILINE)  # 3 blocks
    assert "256 B = 2 × 2 layers × 2 heads × 8 × 4 bytes" in result.stdout
    assert "documents are short, so they are read in full" in " ".join(run(*asked).stdout.split())
    (notes / "long.txt").write_text("word " * 60)
    assert re.search(r"^companion +679 +7 +.* compute", run(*asked).stdout, re.MULTILINE), "by default"


def test_plan_says_that_documents_that_are_alike_are_read_in_full(tiny_model: Path, tmp_path: Path) -> None:
    for number in range(2):
        record = f"Invoice 2088{number}: customer Harden Tools, amount {number}10 euros."
        (tmp_path / f"{number}.txt").write_text(record)
    shown = " ".join(run("plan", tiny_model, "--documents", tmp_path, "-q", "Where?").stdout.split())
    assert "documents are alike, so they are read in full" in shown and "plain" in shown


def test_check_passes_on_a_rotary_model(tiny_model: Path) -> None:
    result = run("check", tiny_model)
    assert result.exit_code == 0
    assert "half, whole head" in result.stdout
    assert "passed: documents can be cached and read at any position." in result.stdout


def test_check_fails_with_exit_code_1_when_the_logits_differ(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "kvmosaic.engine.self_check.composed._differences"
    monkeypatch.setattr(wrong, lambda ours, theirs: torch.full((len(theirs),), 1.5, dtype=torch.float64))
    result = run("check", tiny_model)
    assert result.exit_code == 1
    assert "logits differs from one dense forward by 1.5" in " ".join(result.stdout.split())


def test_missing_model_is_one_message(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "kvmosaic", "run", str(tmp_path / "nowhere"), "-q", "Why?")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("kvmosaic: there is no folder")


def test_empty_folder_and_empty_input_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    assert "no file that can be read" in run("run", tiny_model, "--documents", tmp_path, "-q", "Why?").stderr
    result = run("run", tiny_model, "-", text="\n \n")
    assert result.exit_code == 2 and "standard input is empty" in result.stderr
    result = run("run", tiny_model, "-", text=b"a ## b\xff ## c")
    assert result.exit_code == 2 and "standard input is not UTF-8 text (byte 6)" in result.stderr


def test_input_is_one_prompt_per_line_or_one_in_all() -> None:
    assert split_input("a ## b ## c\n\nd ## e ## f\n", "##") == ["a ## b ## c", "d ## e ## f"]
    assert split_input("a ## b\nmore ## c\n", "##") == ["a ## b\nmore ## c"]
    for never in (None, ""):
        assert split_input(" a ## b ## c\n\nd ## e ## f\n", never) == [" a ## b ## c\n\nd ## e ## f\n"]


def test_escaped_separators_make_no_line_a_prompt() -> None:
    assert split_input("a \\## b \\## c\nd ## e\n", "##") == ["a \\## b \\## c\nd ## e"]


def test_input_with_a_line_that_is_no_prompt_is_refused_with_its_number() -> None:
    with pytest.raises(InvalidPrompt, match="line 3 of standard input is not a prompt"):
        split_input("a ## b ## c\n\nd ## e\nf ## g ## h\n", "##")
    with pytest.raises(InvalidPrompt, match="line 2 of standard input"):
        split_input("a ## b ## c\nd \\## e ## f\n", "##")


def test_empty_question_is_refused_before_the_model_loads() -> None:
    result = run("run", "no-such-model", "-q", " ")
    assert result.exit_code == 2 and "--question is empty" in result.stderr


@pytest.mark.parametrize("options", [(), ("--chunk-separator", "")])
def test_text_is_an_ordinary_prompt_byte_for_byte_unless_a_separator_is_named(
    tiny_model: Path, options: tuple[str, ...]
) -> None:
    text = " # Title\n## Bellos ## eats ## carrots.\n\n### What ## does ## it eat?\n"
    expected = len(AutoTokenizer.from_pretrained(tiny_model)(text)["input_ids"])
    for asked, stdin in ((text, None), ("-", text)):
        result = run("run", tiny_model, asked, *options, "--max-tokens", "1", "--json", text=stdin)
        (segment,) = json.loads(result.stdout)["reuse"]["segments"]
        assert (segment["kind"], segment["num_tokens"]) == ("plain", expected)


def test_separator_of_white_space_is_refused_in_words_of_the_command_line() -> None:
    result = run("run", "no-such-model", "a ## b ## c", "--chunk-separator", " ")
    assert "kvmosaic: --chunk-separator is white space; give a text such as '##', or '' to never split" in result.stderr


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("prompt", ["a ## b ## c", "Why is it red?", "word " * 500])
def test_prompt_in_the_place_of_the_model_is_answered_with_the_right_command(command: str, prompt: str) -> None:
    result = run(command, prompt)
    assert result.exit_code == 2
    assert "the first argument is the model" in result.stderr
    assert f"kvmosaic {command} reader '{prompt[:11]}" in result.stderr


def test_long_documents_are_refused_or_split(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("The kiln burns lime. " * 120)  # 2,520 tokens; the model has 2,048 positions
    arguments = ("plan", tiny_model, "--documents", tmp_path, "-q", "Why?")
    assert "long_chunks" in run(*arguments, "--long-chunks", "error").stderr
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "long.txt (1/3)" in result.stdout


def test_capacity_is_the_memory_for_documents(tiny_model: Path, notes: Path) -> None:
    result = run("run", tiny_model, "--documents", notes, "-q", "Why?", "--chunk-cache-size", "9 apples")
    assert result.exit_code == 2 and "'9 apples' is not a size" in result.stderr
    result = run(
        "run", tiny_model, "--documents", notes, "-q", "Why?", "--chunk-cache-size", "8KiB", "--max-tokens", "1"
    )
    assert result.exit_code == 2 and "chunk" in result.stderr


@pytest.fixture
def number_of_threads() -> Iterator[Callable[[], int]]:
    import torch

    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("command", ["run", "check"])
def test_number_of_threads_and_packing_are_options(
    command: str, tiny_model: Path, number_of_threads: Callable[[], int]
) -> None:
    asked = ("Answer. ## A red kiln. ## Why?", "--max-tokens", "1") if command == "run" else ()
    result = run(command, tiny_model, *asked, "--num-threads", "3", "--prepack", "never")
    assert result.exit_code == 0, result.output
    assert number_of_threads() == 3
    for wrong in ("0", "1025", "many"):
        result = run(command, tiny_model, *asked, "--num-threads", wrong)
        assert result.exit_code == 2 and "--num-threads" in result.stderr
    result = run(command, tiny_model, *asked, "--prepack", "always")
    assert result.exit_code == 2
    assert "prepack is 'always': bfloat16 layers are packed, on a CPU, but this model is in float32" in result.stderr


def test_check_says_whether_layers_are_packed() -> None:
    never, always = (run("check", "--dtype", "bfloat16", "--prepack", word) for word in ("never", "always"))
    assert never.exit_code == 0 and " packed linear layers" not in never.stdout
    if has_onednn_for_bfloat16():
        assert " packed linear layers" in always.stdout
    else:
        assert always.exit_code == 2 and "torch has no oneDNN for bfloat16 here; use 'auto'" in always.stderr


def test_a_warning_of_the_library_is_a_line_without_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    _show_note("documents were divided", UserWarning, "llm.py", 7)
    _show_note("old", DeprecationWarning, "llm.py", 7)
    assert capsys.readouterr().err == "note: documents were divided\nllm.py: DeprecationWarning: old\n"


@pytest.mark.parametrize("command", ["plan", "check"])
def test_tables_on_60_columns_keep_their_numbers_whole(
    command: str, tiny_model: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    (notes / "ferry.txt").rename(notes / "a very long name for the ferry to Oak Island.txt")
    how = ("--position-strategy", "sequential", "--chunk-context", "system")
    asked = ("--documents", notes, "-q", "Where?", *how) if command == "plan" else ()
    result = run(command, tiny_model, *asked)
    assert all(len(line) <= 60 for line in result.stdout.splitlines())
    if command == "plan":
        assert re.search(r"^kiln\.md +42 +0 +\+78 +12 KiB +compute", result.stdout, re.MULTILINE)
        assert re.search(r"^a very.*… +78 +0 +20 KiB +compute", result.stdout, re.MULTILINE)
    else:
        assert re.search(r"^0–1 +4 / 2 +8 .* 6,283 +full +yes", result.stdout, re.MULTILINE), result.stdout
        assert re.search(r"^attention .* [\d.e-]+ +0.001 ", result.stdout, re.MULTILINE), result.stdout


def test_asking_needs_something_to_ask() -> None:
    with pytest.raises(InvalidPrompt, match="nothing is asked"):
        PromptSource()


def test_an_answer_with_a_window_goes_on_behind_the_model(tiny_model: Path) -> None:
    options = ("--json", "--window-tokens", "12", "--sink-tokens", "2", "--max-tokens", "60")
    answered = json.loads(run("run", tiny_model, "-q", "Where?", *options).stdout)
    assert "tokens see the first 2 and the newest 12 tokens" in answered["reuse"]["composition"]
    refused = run("run", tiny_model, "-q", "Where?", "--sink-tokens", "2")
    assert refused.exit_code == 2 and "there is no window_tokens" in refused.output


def test_repair_and_profile_are_options_and_what_happened_is_shown(
    tiny_model: Path, notes: Path, tmp_path: Path
) -> None:
    asked = ("run", tiny_model, "--documents", notes, "-q", "Where?", "--max-tokens", "2", "--dtype", "float32")
    result = run(*asked, "--repair", "first(4)", "--json")
    assert json.loads(result.stdout)["reuse"]["repair"]["policy"] == "first(4)"
    shown = run(*asked, "--repair", "first(4)").stdout
    assert re.search(r"first\(4\): 8 of \d+ document tokens repaired", shown), shown
    wrong = run(*asked, "--repair", "most")
    assert wrong.exit_code == 2 and "choose one of none, first(k)" in wrong.stderr
    missing = run(*asked, "--profile", tmp_path / "missing.json")
    assert missing.exit_code == 2 and "there is no file" in missing.stderr
