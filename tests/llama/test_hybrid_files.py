"""GGUF files of models whose layers carry a state: llama.cpp is not asked, and transformers composes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.gguf import save_gguf
from support.gguf_families import hybrid_file
from typer.testing import CliRunner

from kvmosaic import LLM, SamplingParams
from kvmosaic.cli import app
from kvmosaic.errors import UnsupportedModel
from kvmosaic.lab.capacity.model_facts import read_gguf_facts
from kvmosaic.llama.model import load_llama

pytestmark = pytest.mark.usefixtures("seen_by_caplog")


@pytest.mark.slow
def test_files_of_models_with_states_run_in_transformers_and_compose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp keeps a state for whole texts only; transformers reads such files since 5.23."""
    known = set(pytest.importorskip("transformers.integrations.gguf").GGUF_ARCHS) & {"lfm2", "qwen35"}
    assert known
    for architecture in known:
        check_one(tmp_path, architecture, caplog)


def check_one(tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.gguf"
    module = hybrid_file(path, architecture)
    with pytest.raises(
        UnsupportedModel, match=rf"m\.gguf \({architecture}\) has layers that carry a state, which llama"
    ):
        LLM(path, engine="llama")
    planned = CliRunner().invoke(app, ["plan", str(path), "--device-memory", "8GiB"])
    assert planned.exit_code == 0 and "dequantized" in planned.output
    with LLM(path, self_check=False) as llm:
        assert "carry a state: it runs in transformers, dequantized" in caplog.text
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
        composed = replace(params, repair="none")
        documents = ["The ferry goes at noon from the pier.", "The mill is old and stands by the river."]
        for _ in range(2):
            (output,) = llm.chat([{"role": "user", "content": "When?"}], composed, documents=documents)
        assert [each.action for each in output.reuse.segments if each.kind == "chunk"] == ["reused", "moved"]
        (output,) = llm.generate("Where is the ferry?", params)
        likely = torch.log_softmax(module(torch.tensor([output.prompt_token_ids])).logits[0, -1].double(), -1)
        found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
        assert all(abs(logprob - float(likely[token])) < 1e-4 for token, logprob in found.items())


def test_layers_with_a_state_are_refused_by_llama_before_the_weights_are_read(tmp_path: Path) -> None:
    for architecture, key in (
        ("granitehybrid", "ssm.state_size"),
        ("rwkv7", "wkv.head_size"),
        ("lfm2", "shortconv.l_cache"),
    ):
        path = save_gguf(tmp_path / "m.gguf", architecture=architecture, metadata={f"{architecture}.{key}": 4})
        with pytest.raises(
            UnsupportedModel, match=rf"\({architecture}\) has layers that carry a state.*'transformers', w"
        ):
            load_llama(path)
        with pytest.raises(UnsupportedModel, match="carry a state"):
            read_gguf_facts(path)
