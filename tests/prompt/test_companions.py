"""Companions: texts of a setting, a request or a file, written as the documents of a prompt are."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.loaded import chatting_llama
from support.tokenizers import CHATML, READER, make_tokenizer

from kvmosaic import LLM, ChunkCacheConfig, SamplingParams
from kvmosaic.errors import InvalidConfig
from kvmosaic.prompt import PromptEncoder
from kvmosaic.prompt.companions import MAX_COMPANIONS, paragraph_for, paragraphs, read_companions

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Who is the contact?"}]
RECORDS = [f"Invoice 2088{number}: customer Halden Foods, amount 4,{number}10 euros." for number in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=2)


@pytest.mark.parametrize("template", [CHATML, READER])
def test_a_companion_is_written_as_a_document_of_the_prompt_is(template: str) -> None:
    encoder = PromptEncoder(make_tokenizer(template), ChunkCacheConfig(), vocab_size=1_000).beside(RECORDS[2:5])
    prompt = encoder.encode_chat(MESSAGES, RECORDS)
    assert prompt.companions == tuple(chunk.token_ids for chunk in prompt.chunks[2:5])
    assert encoder.encode_chat(MESSAGES).companions == (), "an ordinary prompt has none"


def test_texts_come_from_a_request_a_file_or_the_package(tmp_path: Path) -> None:
    file = tmp_path / "companions.txt"
    file.write_text(f"{RECORDS[0]}\n\n\n{RECORDS[1]}\nPaid.\n")
    assert read_companions(str(file)) == (RECORDS[0], f"{RECORDS[1]}\nPaid.")
    assert read_companions(RECORDS[:3]) == tuple(RECORDS[:3]) and read_companions("prose") == ()
    assert ChunkCacheConfig(companions=tuple(RECORDS[:3])).companions == tuple(RECORDS[:3])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "1 to 24 texts, got 0; three of a kind are enough"),
        (["a"] * (MAX_COMPANIONS + 1), "1 to 24 texts, got 25"),
        (["  "], "a text of 1 to 20000 characters, got '  '"),
        (["x" * 20_001], "a text of 1 to 20000 characters"),
        ([3], "got 3"),
        (7, "texts, got 7"),
        ("nowhere.txt", r"'prose', 'stored' or a file of texts .*'nowhere.txt' cannot be read: No such file"),
    ],
)
def test_what_is_no_companion_is_refused_with_the_value_and_the_limit(wrong: object, message: str) -> None:
    for reader in (read_companions, lambda value: ChunkCacheConfig(companions=value)):
        with pytest.raises(InvalidConfig, match=message):
            reader(wrong)  # type: ignore[arg-type]


def test_warmed_documents_are_known_at_every_place_and_other_companions_are_other_copies() -> None:
    with LLM(chatting_llama(), profile=False) as llm:
        handles = llm.warm(RECORDS[:2], system="Answer.", companions=RECORDS[3:])
        assert len(handles) == 2 and llm.get_chunk_cache_stats().cached_chunks == 8, "none to three companions each"

        for order in (RECORDS[:2], RECORDS[1::-1], [RECORDS[0]] * 4 + [RECORDS[1]]):
            (output,) = llm.chat(MESSAGES, PARAMS, documents=order, companions=RECORDS[3:])
            chunks = [segment for segment in output.reuse.segments if segment.kind == "chunk"]
            assert all(chunk.reused_tokens == chunk.num_tokens for chunk in chunks)
            assert "computed after companions" in output.reuse.composition
        (output,) = llm.chat(MESSAGES, PARAMS, documents=RECORDS[:2], companions=RECORDS[4:])
        first, second = (segment for segment in output.reuse.segments if segment.kind == "chunk")
        assert first.reused_tokens and not second.reused_tokens


def test_the_bundled_companion_is_in_the_language_of_most_documents() -> None:
    others = ["def f(x): return x + 1", "Kaikki lentokoneet laskeutuivat ajoissa."]
    for text in paragraphs().values():
        half = len(text) // 2
        assert paragraph_for([text[:half], text[half:], *others]) == text
        assert paragraph_for([*others, text[half:], text[:half]]) == text
    assert paragraph_for(others) == paragraph_for([]) == paragraphs()["en"]


def test_german_documents_have_met_a_german_companion() -> None:
    tokenizer = make_tokenizer(CHATML)
    documents = ["Die Fähre fährt zu der Insel und ist um sechs zurück.", "Der Ofen brennt den Kalk für das Dorf."]
    (companion,) = (
        PromptEncoder(tokenizer, ChunkCacheConfig(), vocab_size=1_000).encode_chat(MESSAGES, documents).companions
    )
    assert paragraphs()["de"] in tokenizer.decode(companion)
