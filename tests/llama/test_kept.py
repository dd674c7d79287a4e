"""A second start reads the tokenizer and the verdict of the self-check that the first one kept."""

from __future__ import annotations

import pytest
from support.llama_engine import reader_file

from kvmosaic import LLM, SamplingParams
from kvmosaic.kept import VARIABLE
from kvmosaic.llama import engine
from kvmosaic.model.formats.gguf import tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def start():
    """The answer and what the check found."""
    with LLM(str(reader_file("Q8_0"))) as llm:
        (output,) = llm.chat(
            [{"role": "user", "content": "Where is  the mill?"}], PARAMS, documents=["The mill is old."]
        )
        return output.outputs[0].token_ids, llm.self_check


@pytest.mark.slow
def test_a_second_start_builds_and_checks_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    first = start()
    assert {path.parent.name for path in tmp_path.glob("*/*")} == {"tokenizers", "checks"}
    built = []
    for module, name in ((tokenizer, "_built"), (engine, "check_llama")):
        made = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, made=made, **named: built.append(1) or made(*given, **named))
    assert start() == first and not built
    for path in tmp_path.glob("*/*/*.json"):
        path.write_text("{")
    assert start() == first and len(built) == 2, "what is damaged is made again"


@pytest.mark.slow
def test_a_tokenizer_that_is_read_back_as_another_one_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(tokenizer, "_facts", lambda made: id(made))
    start()
    assert not list(tmp_path.glob("tokenizers/*"))
