"""A plain string is an ordinary prompt, and without the chunk cache so is the text of a composed one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.loaded import chatting_llama

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Segment, SegmentKind

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
SMALL = EngineConfig(request_cache_size="4MiB", max_num_batched_tokens=256)
MARKDOWN = " # Title\n\n## First heading\n\ntext \\## more\n\n### Second\n\n```c\n#define a b##c\n```\n\n## Question \n"
PARTS = ("Be brief.", "The ferry goes.", "The mill <|im_end|> grinds.", "Where does the ferry go?")
MESSAGES = [{"role": "system", "content": PARTS[0]}, {"role": "user", "content": PARTS[3]}]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return chatting_llama()


@pytest.fixture(scope="module")
def off(model):
    with LLM(model, enable_chunk_cache=False, engine_config=SMALL) as llm:
        yield llm


def asked(llm, prompt):
    """The tokens that the model reads, and the report."""
    (output,) = llm.generate(prompt, GREEDY)
    return list(output.prompt_token_ids), output


@pytest.mark.parametrize("enable", [True, False])
def test_markdown_is_read_byte_for_byte(model, enable):
    config = ChunkCacheConfig(chunk_cache_size="1MiB")
    with LLM(model, enable_chunk_cache=enable, chunk_cache_config=config, engine_config=SMALL) as llm:
        token_ids, output = asked(llm, MARKDOWN)
        assert token_ids == llm.model.tokenizer(MARKDOWN)["input_ids"]
        assert output.prompt == MARKDOWN
        assert [segment.kind for segment in output.reuse.segments] == ["plain"]
        assert output.reuse.composition == "exact"
        assert llm.plan(MARKDOWN).spans[0].num_tokens == len(token_ids)
        *_, last = llm.stream(MARKDOWN, GREEDY)
        assert list(last.prompt_token_ids) == token_ids


def test_a_separator_that_the_settings_name_splits(model):
    config = ChunkCacheConfig(chunk_cache_size="1MiB", chunk_separator="##")
    with LLM(model, chunk_cache_config=config, engine_config=SMALL) as llm:
        (output,) = llm.generate(" ## ".join(PARTS), replace(GREEDY, repair="none"))
        assert [segment.kind for segment in output.reuse.segments] == ["system", "chunk", "chunk", "question"]


@pytest.mark.parametrize("text", ["{} ## {} ## {} ## {}", "{}##{}##{}##{}", "{}\n##\n{}\n##\n{}\n##\n{}"])
def test_without_the_chunk_cache_separated_parts_are_paragraphs_of_one_text(off, text):
    token_ids, output = asked(off, Prompt.from_text(text.format(*PARTS)))
    assert output.prompt == "\n\n".join(PARTS)
    assert output.reuse.composition == "exact; not composed: switched off (enable_chunk_cache=False)"
    assert off.model.tokenizer.decode(token_ids, skip_special_tokens=True) == "\n\n".join(PARTS)


def test_without_the_chunk_cache_a_composed_prompt_has_the_tokens_of_its_text(off):
    harmless = [part.replace("<|im_end|>", "") for part in PARTS]
    system, *documents, question = harmless
    token_ids, _ = asked(off, "\n\n".join(harmless))
    assert asked(off, Prompt.from_text("##".join(harmless)))[0] == token_ids
    assert asked(off, Prompt.from_documents(documents, question, system=system))[0] == token_ids
    kinds = (SegmentKind.SYSTEM, SegmentKind.CHUNK, SegmentKind.CHUNK, SegmentKind.QUESTION)
    spaced = [*(f"{part}\n\n" for part in harmless[:-1]), question]
    segments = [Segment(kind, text=text) for kind, text in zip(kinds, spaced, strict=True)]
    assert asked(off, Prompt(tuple(segments)))[0] == token_ids, "white space that is there already is enough"


def test_without_the_chunk_cache_a_conversation_has_the_tokens_of_the_rendered_text(off):
    tokenizer = off.model.tokenizer
    (output,) = off.chat(MESSAGES, GREEDY, documents=[part.replace("<|im_end|>", "") for part in PARTS[1:3]])
    system = "\n\n".join(part.replace("<|im_end|>", "") for part in PARTS[:3]) + "\n\n"
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": "@@"}, MESSAGES[1]], tokenize=False, add_generation_prompt=True
    ).replace("@@", system)
    assert output.prompt == rendered
    assert list(output.prompt_token_ids) == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert "not composed" in output.reuse.composition


def test_control_tokens_of_documents_stay_text_when_prompts_are_joined(off):
    control = off.model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert control not in asked(off, Prompt.from_text(" ## ".join(PARTS)))[0]
    (output,) = off.chat(MESSAGES, GREEDY, documents=list(PARTS[1:3]))
    rendered = off.model.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert output.prompt_token_ids.count(control) == rendered.count(control)


def test_segments_of_token_ids_are_joined_as_they_are(off):
    token_ids, output = asked(off, Prompt.from_tokens([1, 2], [[3], [4, 5]], [6]))
    assert token_ids == [1, 2, 3, 4, 5, 6]
    assert "not composed" in output.reuse.composition
    composed = replace(off.compose(MESSAGES, documents=["One."]), salt="a")
    assert "not composed" in asked(off, composed)[1].reuse.composition
