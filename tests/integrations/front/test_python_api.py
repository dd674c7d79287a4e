"""Prompts for vLLM's Python `LLM`: what it is given, and that nothing is imported before."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from support.asking import DOCUMENTS, MESSAGES
from support.tokenizers import CHATML, make_tokenizer

from kvmosaic import Prompt
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, InvalidDocument, InvalidPrompt
from kvmosaic.prompt import PromptEncoder
from kvmosaic.vllm import chat, engine_arguments, generate
from kvmosaic.vllm.contract import Composition

TEXT = "System. ## One document. ## Another one. ## What?"


@dataclass
class Params:
    """As vLLM's `SamplingParams`, as far as they are used."""

    extra_args: dict[str, Any] | None = None
    max_tokens: int = 16

    def clone(self) -> Params:
        return Params(dict(self.extra_args) if self.extra_args else None, self.max_tokens)


@dataclass
class Engine:
    """As vLLM's `LLM`: tells what it is given."""

    tokenizer: Any = field(default_factory=lambda: make_tokenizer(CHATML))

    @property
    def llm_engine(self) -> Any:
        config = SimpleNamespace(get_vocab_size=lambda: len(self.tokenizer), max_model_len=4096)
        return SimpleNamespace(model_config=config)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def get_default_sampling_params(self) -> Params:
        return Params(max_tokens=7)

    def generate(self, inputs: Any, params: Any, **options: Any) -> Any:
        return [*zip(inputs, params, strict=True), options]


def composition_of(given: Any) -> Composition | None:
    prompt, params = given
    return Composition.from_params(params.extra_args["kv_transfer_params"], len(prompt["prompt_token_ids"]))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_nothing_of_vllm_is_imported_before_it_is_used() -> None:
    code = (
        "import sys; from kvmosaic.vllm import generate, chat, engine_arguments\n"
        "print({'vllm', 'torch', 'fastapi'} & set(sys.modules))"
    )
    assert subprocess.run((sys.executable, "-c", code), capture_output=True, text=True).stdout == "set()\n"


def test_the_arguments_of_an_engine() -> None:
    assert engine_arguments() == {
        "kv_transfer_config": {"kv_connector": "kvmosaic", "kv_role": "kv_both"},
        "enable_prefix_caching": True,
    }
    assert engine_arguments(a=1)["kv_transfer_config"]["kv_connector_extra_config"] == {"a": 1}


def test_prompts_of_every_kind_get_their_borders(engine: Engine) -> None:
    prompt = Prompt.from_documents(DOCUMENTS, "What?", system="System.", salt="s")
    ids = Prompt.from_tokens([5, 6], [[7, 8, 9], [7]], [5, 5])
    text, documents, tokens, plain, options = generate(
        engine,
        [TEXT, prompt, ids, [5, 6, 7]],
        repair="first(2)",
        position_strategy="shared",
        separator="##",
        use_tqdm=False,
    )
    encoder = PromptEncoder(engine.tokenizer, ChunkCacheConfig(), vocab_size=len(engine.tokenizer))
    expected = encoder.encode(Prompt.from_text(TEXT))
    assert text[0] == {"prompt_token_ids": [token for each in expected.segments for token in each.token_ids or ()]}
    assert composition_of(text) == Composition(
        expected.segments[0].num_tokens, tuple(chunk.num_tokens for chunk in expected.chunks), "shared", repair=2
    )
    assert documents[0]["cache_salt"] == "s"
    assert composition_of(documents).ids == ("ferry", "mill", "zoo")  # type: ignore[union-attr]
    assert composition_of(tokens) == Composition(2, (3, 1), "shared", repair=2)
    assert plain == ({"prompt_token_ids": [5, 6, 7]}, Params(max_tokens=7))
    assert options == {"use_tqdm": False}


@pytest.mark.parametrize("options", [{}, {"separator": None}, {"separator": ""}])
def test_a_text_is_an_ordinary_prompt_unless_a_separator_is_named(engine: Engine, options: dict[str, Any]) -> None:
    text, _ = generate(engine, TEXT, **options)
    assert text == ({"prompt_token_ids": engine.tokenizer(TEXT)["input_ids"]}, Params(max_tokens=7))


def test_the_callers_sampling_parameters_are_not_changed(engine: Engine) -> None:
    given = Params({"mine": 1, "kv_transfer_params": {"other": 2}})
    [(_, params), _] = generate(engine, TEXT, given)
    assert given == Params({"mine": 1, "kv_transfer_params": {"other": 2}})
    assert params.extra_args["mine"] == 1 and params.extra_args["kv_transfer_params"]["other"] == 2
    each = [Params(max_tokens=1), Params(max_tokens=2)]
    first, second, _ = generate(engine, [TEXT, TEXT], each)
    assert (first[1].max_tokens, second[1].max_tokens) == (1, 2)
    with pytest.raises(InvalidPrompt, match="2 sampling_params for 1 prompts"):
        generate(engine, [TEXT], each)


def test_conversations_have_the_tokens_of_the_template(engine: Engine) -> None:
    encoder = PromptEncoder(engine.tokenizer, ChunkCacheConfig(), vocab_size=len(engine.tokenizer))
    expected = encoder.encode_chat(MESSAGES, DOCUMENTS)
    token_ids = [token for segment in expected.segments for token in segment.token_ids or ()]
    [(prompt, _), _] = chat(engine, MESSAGES, documents=DOCUMENTS)
    assert prompt == {"prompt_token_ids": token_ids}
    several = chat(engine, [MESSAGES, MESSAGES], documents=DOCUMENTS, salt="s")
    assert [given[0]["cache_salt"] for given in several[:2]] == ["s", "s"]
    [(prompt, params), _] = chat(engine, MESSAGES)
    assert params.extra_args is None


def test_what_vllm_cannot_compose_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidConfig, match="'sequential' or 'shared'"):
        generate(engine, TEXT, position_strategy="absolute")
    with pytest.raises(InvalidConfig, match="first"):
        generate(engine, TEXT, repair=3)
    with pytest.raises(InvalidDocument):
        chat(engine, MESSAGES, documents=[3])
    ids = Prompt.from_tokens([5], [[7], [8]], [9])
    seeing = Prompt((*ids.segments[:2], type(ids.segments[2])("chunk", (8,), sees=(0,)), ids.segments[3]))
    with pytest.raises(InvalidPrompt, match="has sees, which vLLM cannot compose"):
        generate(engine, seeing)
    with pytest.raises(InvalidConfig, match="object, with which texts cannot be cut"):
        generate(Engine(object()), TEXT)
