"""`kvmosaic plan` of this machine and of another device, beside the plan of a prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvmosaic.assembly import bundled_reader
from kvmosaic.capacity.machine import memory_here
from kvmosaic.cli import app
from kvmosaic.model.cpu.prepack import cpu_has_bfloat16
from kvmosaic.model.load import load_model

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


def test_a_folder_a_file_and_the_option_name_the_same_model(tiny_model: Path) -> None:
    folder = planned(tiny_model, *ASKED)
    assert (
        folder["model"]["kv_bytes_per_token"] == 256
    )  # as `plan` of a prompt says: 2 × 2 layers × 2 heads × 8 × 4 bytes
    assert planned(tiny_model / "config.json", *ASKED) == folder
    assert planned("--model", tiny_model, *ASKED) == folder
    assert folder["memory"]["resident_documents"] == 1_000 and folder["hit_rate"] == 1.0


def test_counted_weights_are_those_in_the_file(tiny_model: Path) -> None:
    on_disk = (tiny_model / "model.safetensors").stat().st_size
    counted = planned(tiny_model, *ASKED)["model"]["weight_bytes"]
    assert counted == pytest.approx(on_disk, rel=0.05)


def test_a_family_has_the_sizes_of_transformers() -> None:
    found = planned("llama", "--device-memory", "80GiB", "--documents", "1,000", "--tokens-per-document", "1000")
    assert found["model"]["num_parameters"] == 6_738_415_616
    assert found["model"]["kv_bytes_per_token"] == 2 * 32 * 32 * 128 * 2
    assert "the sizes that transformers gives 'llama'" in found["notes"][0]
    assert "assumed" in found["speed"]["source"]


def test_the_plan_shows_memory_hit_rate_first_token_and_tiers(tiny_model: Path) -> None:
    text = plan(tiny_model, *ASKED, "--concurrency", "4", "--chunk-tier", "host:1GiB", "--hardware", "l4").stdout
    for word in (
        "one token",
        "weights",
        "headroom",
        "requests",
        "they hold",
        "and in the host tier",
        "object",
        "NVIDIA L4",
    ):
        assert word in text
    assert re.search(r"kvmosaic serve MODEL --chunk-cache-size \d+MiB --request-cache-size \d+MiB", text)


def test_given_speeds_and_weights_are_used(tiny_model: Path) -> None:
    speeds = ("--flops", "1T", "--bandwidth", "10GB/s", "--tier-speed", "disk=2GB/s,1ms", "--weights", "1GiB")
    found = planned(tiny_model, *ASKED, *speeds, "--chunk-tier", "disk:/nowhere?quota=1GiB")
    assert found["speed"]["flops_per_second"] == 1e12 and found["memory"]["weight_bytes"] == 2**30
    disk = found["tiers"][0]["tier"]
    assert (disk["bytes_per_second"], disk["latency_seconds"], disk["source"]) == (2e9, 1e-3, "as given")
    assert disk["quota_bytes"] == 2**30 and not Path("/nowhere").exists()


def test_a_speed_without_a_tier_is_only_compared(tiny_model: Path) -> None:
    found = planned(tiny_model, *ASKED, "--tier-speed", "redis=50GB/s,10us")
    assert [stage["name"] for stage in found["stages"]] == ["computed", "device"]
    speeds = {tier["tier"]["kind"]: tier["tier"]["bytes_per_second"] for tier in found["tiers"]}
    assert speeds["redis"] == 50e9 and not any(tier["is_planned"] for tier in found["tiers"])


def test_a_plot_is_a_file(tiny_model: Path, tmp_path: Path) -> None:
    assert plan(tiny_model, *ASKED, "--plot", tmp_path / "plan.png").exit_code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "a plot is a .png" in refused(tiny_model, *ASKED, "--plot", tmp_path / "plan.txt")
    assert "cannot be written" in refused(tiny_model, *ASKED, "--plot", tmp_path / "no" / "plan.png")


def test_measuring_looks_at_this_machine_and_at_the_tiers(tiny_model: Path, tmp_path: Path) -> None:
    url = f"disk:{tmp_path}/cache?quota=1GiB"
    found = planned(tiny_model, *ASKED, "--measure", "--chunk-tier", "host:1GiB", "--chunk-tier", url)
    assert "of what was measured" in found["speed"]["source"]
    sources = [tier["tier"]["source"] for tier in found["tiers"]]
    assert sources == ["measured", "measured, files in the page cache", "assumed", "assumed"]
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_is_measured_is_planned_in_the_type_it_would_load() -> None:
    types = [planned("reader", *ASKED, *more)["model"]["dtype"] for more in ((), ("--measure",))]
    assert types == ["bfloat16", "bfloat16" if cpu_has_bfloat16() else "float32"]


@pytest.mark.parametrize("asked", [(), ("--documents", "50"), ("--tokens-per-document", "1000")], ids=str)
def test_without_a_prompt_and_another_device_this_machine_is_planned_as_it_would_serve(asked: tuple[str, ...]) -> None:
    found = planned("reader", *asked)
    assert found["model"]["dtype"] == ("bfloat16" if cpu_has_bfloat16() else "float32")
    assert "of what was measured" in found["speed"]["source"]
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
        (("reader", "--model", "llama", *ASKED), "the model is given twice"),
        (
            ("--device-memory", "1GiB", "--documents", "notes"),
            "--documents is 'notes'; the plan of a device needs a whole",
        ),
        (("reader", "--documents", "500", "-q", "Why?"), "there is no folder of that name; for the plan of this mach"),
        ((*ASKED, "--device-memory", "lots"), "'lots' is not a size"),
        ((*ASKED, "--device-memory", "1MiB"), "does not fit into"),
        ((*ASKED, "--zipf", "9"), "zipf must be a number between 0 and 4"),
        ((*ASKED, "--block-size", "0"), "block_size must be a whole number between 1 and 4096"),
        ((*ASKED, "--hardware", "abacus"), "there are no figures of 'abacus'"),
        ((*ASKED, "--hardware", "l4", "--measure"), "only one of them"),
        ((*ASKED, "--flops", "1T"), "--flops and --bandwidth belong together; --bandwidth is missing"),
        ((*ASKED, "--tier-speed", "tape=1GB/s"), "--tier-speed is 'tape=1GB/s'"),
        ((*ASKED, "--chunk-tier", "host:1GiB", "--chunk-tier", "host:2GiB"), "two tiers are of kind host"),
        (("no-such-family", *ASKED), "transformers has no family of that name"),
        (("./nowhere/config.json", *ASKED), "there is no folder or file"),
        (("reader", *ASKED, "--dtype", "float8"), "dtype is 'float8'"),
        (("qwen3_next", *ASKED), "cannot be composed"),
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
