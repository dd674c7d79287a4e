"""Commands with a GGUF file: what they say about it, and about files that llama.cpp does not run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.gguf import save_gguf
from support.llama_engine import reader_file
from typer.testing import CliRunner, Result

from kvmosaic import LLM, ChunkCacheConfig
from kvmosaic.cli import app
from kvmosaic.errors import InvalidConfig, pip_install
from kvmosaic.lab.capacity import read_model
from kvmosaic.lab.capacity.model_facts import read_gguf_facts
from kvmosaic.llama import interface
from kvmosaic.model.formats.gguf.file import read_gguf


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_check_names_the_type_of_the_weights_as_the_file_has_them() -> None:
    result = run("check", reader_file("Q8_0"))
    assert result.exit_code == 0 and "(llama, Q8_0)" in result.output and "guessed" not in result.output


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"architecture": "unheard"}, "unheard"), ({"has_tokenizer": False}, "tokenizer"), ({"tensors": None}, "")],
)
def test_a_file_that_llama_cpp_refuses_is_refused_with_its_reason(
    options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = save_gguf(tmp_path / "m.gguf", kind="Q8_0", **options)  # type: ignore[arg-type]
    if not reason:
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    result = run("check", path)
    assert result.exit_code == 2 and reason in result.output
    assert "engine='transformers'" in result.output or "download it again" in result.output


def test_a_type_of_the_cache_is_refused_where_transformers_runs_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, options in (("reader", {}), (reader_file("Q8_0"), {"engine": "transformers"})):
        with pytest.raises(InvalidConfig, match=r"kv_cache_dtype='q8_0' is for llama.cpp.*leave it out"):
            LLM(model, kv_cache_dtype="q8_0", **options)
    monkeypatch.setattr(interface, "PACKAGES", ())
    with pytest.raises(InvalidConfig, match=re.escape(pip_install("llama"))):
        LLM(reader_file("Q8_0"), kv_cache_dtype="q8_0")


def test_a_gpu_is_refused_where_llama_cpp_was_built_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface.bindings(), "llama_supports_gpu_offload", lambda: False)
    for device, reason in (("cuda", "built for CPUs only"), ("cuda:1", "CUDA_VISIBLE_DEVICES"), ("gpu", "all GPUs")):
        with pytest.raises(InvalidConfig, match=reason):
            LLM(reader_file("Q8_0"), device=device)


def test_plan_counts_the_weights_of_the_file_and_the_cache_that_is_chosen() -> None:
    path = reader_file("Q8_0")
    header = read_gguf(path)
    room = ("plan", path, "--device-memory", "1GiB", "--documents", 10, "--json")
    for options, cache_bytes in (((), 2.0), (("--kv-cache-dtype", "q8_0"), 1.0625)):
        result = run(*room, *options)
        assert result.exit_code == 0, result.output
        model = json.loads(result.output)["model"]
        assert model["dtype"] == "Q8_0" and model["weight_bytes"] == header.num_bytes - header.data_start
        assert model["kv_bytes_per_token"] == cache_bytes * 6 * 2 * 2 * 64
    assert read_gguf_facts(path).num_parameters == read_model(path).num_parameters
    result = run(*room, "--engine", "transformers")
    assert json.loads(result.output)["model"]["dtype"] == "bfloat16"
    refused = run(*room, "--chunk-codec", "int8")
    assert refused.exit_code == 2 and "positions" in refused.output


def test_eval_leaves_out_what_llama_cpp_cannot_and_says_so() -> None:
    result = run("eval", reader_file("Q8_0"), "--tasks", "one-hop(2)", "--cases", 1, "--capacity", "16MiB")
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "llama, Q8_0, in llama.cpp" in told and "query(0.15), since" in told and "first(8)" in told


def test_a_profile_that_tune_measured_in_llama_cpp_is_followed_there(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", kind="Q8_0")
    goal = ("--max-divergence", 9, "--tasks", "one-hop(2)", "--cases", 1, "--capacity", "16MiB")
    result = run("tune", path, *goal)
    assert result.exit_code == 0, result.output
    with LLM(path, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB")) as llm:
        assert llm.profile is not None and "is followed" in llm.profile_note


def test_the_demo_says_how_documents_were_moved() -> None:
    result = run("demo", reader_file("Q8_0"), "--chunk-cache-size", "64MiB")
    assert result.exit_code == 0, result.output
    assert "llama.cpp rotated the keys of a copy" in " ".join(result.output.split())


def test_tiers_that_warm_filled_are_read_and_verified(tmp_path: Path) -> None:
    notes, tier = tmp_path / "notes", f"disk:{tmp_path}/tier?quota=64MiB"
    notes.mkdir()
    (notes / "ferry.txt").write_text("The ferry goes to Oak Island at noon.")
    path = reader_file("Q8_0")
    assert "1 computed" in run("warm", path, notes, "--chunk-tier", tier, "--kv-cache-dtype", "q8_0").output
    asked = ("--documents", notes, "--question", "Where?", "--chunk-tier", tier, "--chunk-loading", "always")
    asked = ("run", path, *asked, "--max-tokens", 1)
    assert "from tiers" not in run(*asked).output, "a cache of another type is another one"
    assert "(2 from tiers)" in run(*asked, "--kv-cache-dtype", "q8_0").output


def test_answers_are_sampled_as_the_file_says(tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    path = save_gguf(tmp_path / "m.gguf", kind="Q8_0", metadata=sampling)
    with LLM(path, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB")) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (0.25, 7)
