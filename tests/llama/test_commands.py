"""Commands with a GGUF file: what they say about it, and about files that llama.cpp does not run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf import save_gguf
from support.llama_engine import reader_file
from typer.testing import CliRunner, Result

from kvmosaic import LLM, ChunkCacheConfig
from kvmosaic.cli import app
from kvmosaic.errors import InvalidConfig
from kvmosaic.llama import interface


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
    with pytest.raises(InvalidConfig, match=r"pip install 'kvmosaic\[llama\]'"):
        LLM(reader_file("Q8_0"), kv_cache_dtype="q8_0")


def test_answers_are_sampled_as_the_file_says(tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    path = save_gguf(tmp_path / "m.gguf", kind="Q8_0", metadata=sampling)
    with LLM(path, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB")) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (0.25, 7)
