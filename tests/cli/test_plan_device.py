"""`kvmosaic plan` of this machine and of another device, beside the plan of a prompt."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvmosaic.assembly import bundled_reader
from kvmosaic.cli import app
from kvmosaic.lab.capacity.model_facts import memory_here
from kvmosaic.model import load_model
from kvmosaic.model.cpu.prepack import cpu_has_bfloat16

ASKED = ("--device-memory", "2GiB", "--documents", "1000", "--tokens-per-document", "100")


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def planned(*arguments: str | Path) -> Any:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str | Path) -> str:
    result = plan(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_a_folder_and_its_file_name_the_same_model(tiny_model: Path) -> None:
    folder = planned(tiny_model, *ASKED)
    assert (
        folder["model"]["kv_bytes_per_token"] == 256
    )  # as `plan` of a prompt says: 2 × 2 layers × 2 heads × 8 × 4 bytes
    assert planned(tiny_model / "config.json", *ASKED) == folder
    assert folder["memory"]["resident_documents"] == 1_000


def test_counted_weights_are_those_in_the_file(tiny_model: Path) -> None:
    on_disk = (tiny_model / "model.safetensors").stat().st_size
    counted = planned(tiny_model, *ASKED)["model"]["weight_bytes"]
    assert counted == pytest.approx(on_disk, rel=0.05)


def test_a_family_has_the_sizes_of_transformers() -> None:
    found = planned("llama", "--device-memory", "80GiB", "--documents", "1,000", "--tokens-per-document", "1000")
    assert found["model"]["num_parameters"] == 6_738_415_616
    assert found["model"]["kv_bytes_per_token"] == 2 * 32 * 32 * 128 * 2
    assert "the sizes that transformers gives 'llama'" in found["notes"][0]


def test_the_plan_is_three_numbers_and_a_line_to_copy(tiny_model: Path) -> None:
    text = plan(tiny_model, "--device-memory", "80GiB", "--documents", "1000", "--chunk-tier", "host:1GiB").stdout
    for word in ("weights", "documents", "host tier", "free"):
        assert re.search(rf"^{word}  +\S", text, re.MULTILINE), text
    assert re.search(r"documents +1,000 +of 1,000 fit, 252 KiB each\W", text)
    line = next(line for line in text.splitlines() if line.startswith("kvmosaic serve"))
    needed = f"{int(1.25 * 2 * 1000 * 252 / 1024)}MiB"
    assert shlex.split(line)[2:] == [str(tiny_model), "--chunk-cache-size", needed, "--chunk-tier", "host:1GiB"]


@pytest.mark.slow
def test_what_does_not_fit_is_said(tiny_model: Path) -> None:
    text = plan(tiny_model, "--device-memory", "1GiB", "--documents", "100000").stdout
    assert re.search(r"documents +[0-9,]+ +of 100,000 fit, .* each", text)
    assert re.search(r"free +0 B", text)


def test_given_weights_and_tiers_are_used(tiny_model: Path) -> None:
    found = planned(tiny_model, *ASKED, "--weights", "1GiB", "--chunk-tier", "disk:/nowhere?quota=1GiB")
    assert found["memory"]["weight_bytes"] == 2**30
    (disk,) = found["tiers"]
    assert disk["kind"] == "disk" and disk["quota_bytes"] == 2**30 and not Path("/nowhere").exists()


def test_a_folder_is_planned_as_it_is(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.md").write_text("word " * 400)
    demand = planned("reader", "--documents", tmp_path)["demand"]
    assert demand["documents"] == 3 and demand["tokens_per_document"] == 500


@pytest.mark.parametrize("asked", [(), ("--documents", "50"), ("--tokens-per-document", "1000")], ids=str)
def test_without_a_prompt_and_another_device_this_machine_is_planned_as_it_would_serve(asked: tuple[str, ...]) -> None:
    found = planned("reader", *asked)
    assert found["model"]["dtype"] == ("bfloat16" if cpu_has_bfloat16() else "float32")
    assert found["memory"]["device_bytes"] == memory_here()
    model = load_model(bundled_reader(), dtype="auto")
    assert found["model"]["kv_bytes_per_token"] == model.bytes_per_token()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (*ASKED, "-q", "Why?"),
            "--question belongs to the plan of a prompt, and --device-memory to the plan of a device",
        ),
        ((*ASKED, "--chunk-cache-size", "1GiB"), "--chunk-cache-size belongs to the plan of a prompt"),
        (("reader", "a ## b ## c", *ASKED), "PROMPT belongs to the plan of a prompt"),
        (
            ("--device-memory", "1GiB", "--documents", "notes"),
            "--documents is 'notes', and there is no folder of that name; give",
        ),
        (("reader", "--documents", "500", "-q", "Why?"), "there is no folder of that name; for the plan of this mach"),
        ((*ASKED, "--device-memory", "lots"), "'lots' is not a size"),
        ((*ASKED, "--device-memory", "1MiB"), "does not fit into"),
        ((*ASKED, "--block-size", "0"), "block_size must be a whole number between 1 and 4096"),
        ((*ASKED, "--chunk-tier", "host:1GiB", "--chunk-tier", "host:2GiB"), "two tiers are of kind host"),
        (("no-such-family", *ASKED), "transformers has no family of that name"),
        (("./nowhere/config.json", *ASKED), "there is no folder or file"),
        (("reader", *ASKED, "--dtype", "float8"), "dtype is 'float8'"),
        pytest.param(("mamba2", *ASKED), "layers with a state only", marks=pytest.mark.slow),
        (("musicgen", *ASKED), "musicgen has no text model, or several"),
    ],
)
def test_what_cannot_be_planned_is_one_message(arguments: tuple[str, ...], said: str) -> None:
    message = refused(*arguments)
    assert said in message and message.startswith("kvmosaic: ") and message.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is not JSON"),
        ("[1, 2]", "does not name a model_type"),
        ('{"model_type": "abacus"}', "transformers cannot read this configuration of 'abacus'"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000}', "num_hidden_layers is 1000000 in this configuration"),
        ('{"model_type": "gpt2", "n_layer": 3000000}', "n_layer is 3000000 in this configuration"),
        ('{"model_type": "mpt", "n_layers": 3000000}', "n_layers is 3000000 in this configuration"),
        (r'{"model_type": "\u001b]0;x\u0007y"}', "Unrecognized model identifier: \ufffd]0;x\ufffdy"),
        ('{"model_type": "llama", "text_config": {"vocab_size": 99999999999}}', "vocab_size is 99999999999"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers cannot read this configuration of 'llama'"),
        ('{"model_type": "t5"}', "t5"),
    ],
)
def test_strange_configurations_are_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert said.lower() in refused(path, *ASKED).lower()


def test_a_checkpoint_that_is_quantized_says_how_it_was_counted(tmp_path: Path) -> None:
    settings = {"model_type": "llama", "num_hidden_layers": 2, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert "see --weights" in planned(tmp_path, *ASKED)["notes"][0]
