import re

import pytest

from kvmosaic.lab.eval.text.documents import Example, Recipe, TextSource
from kvmosaic.lab.eval.text.names import WORDS, NameSource, is_held_out


def draw(seed: int, split: str, count: int, recipe: Recipe | None = None) -> list[Example]:
    source = TextSource(seed, split)  # type: ignore[arg-type]
    return [source.example(recipe or Recipe()) for _ in range(count)]


def test_same_seed_gives_the_same_examples() -> None:
    assert draw(3, "train", 40) == draw(3, "train", 40)
    assert draw(3, "train", 40) != draw(4, "train", 40)


def test_every_answer_is_copied_from_its_document() -> None:
    for example in draw(1, "train", 300):
        for question in example.questions:
            assert question.answer in example.documents[question.document].text


def test_held_out_stems_never_occur_in_training() -> None:
    source = TextSource(5, "train")
    for _ in range(600):
        source.example(Recipe())
        assert not any(is_held_out(stem) for stem in source.names.stems)


def test_held_out_examples_use_only_held_out_stems() -> None:
    source = TextSource(5, "held_out")
    bare = 0  # prompts about nothing but animals with real names
    for _ in range(200):
        source.example(Recipe())
        bare += not source.names.stems
        assert all(is_held_out(stem) for stem in source.names.stems)
    assert bare < 10


def test_no_held_out_person_or_town_is_a_word_of_the_training_text() -> None:
    source = TextSource(9, "held_out")
    ordinary = {*WORDS["adjectives"], *WORDS["nouns"], *WORDS["street_first"]}
    names = {stem for _ in range(300) for stem in _stems(source) if stem.isalpha()} - ordinary
    text = " ".join(f"{d.title} {d.text}" for example in draw(2, "train", 2000) for d in example.documents)
    assert len(names) > 300
    assert not names & set(re.findall(r"\w+", text))


def _stems(source: TextSource) -> list[str]:
    source.example(Recipe())
    return source.names.stems


def test_about_one_stem_in_eight_is_held_out() -> None:
    stems = [f"stem{number}" for number in range(4000)]
    assert sum(map(is_held_out, stems)) / len(stems) == pytest.approx(1 / 8, abs=0.02)


def test_names_of_one_prompt_differ() -> None:
    for example in draw(6, "train", 200, Recipe(documents=(6, 6), same_kind=1.0, echoes=0.5)):
        titles = [document.title for document in example.documents if document.title]
        assert len(titles) == len(set(titles))


def test_name_source_rejects_no_split_forever() -> None:
    from random import Random

    for split in ("train", "held_out"):
        names = NameSource(Random(1), split)  # type: ignore[arg-type]
        assert len({names.person() for _ in range(200)}) > 150
