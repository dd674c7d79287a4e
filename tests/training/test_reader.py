"""The shipped model folder, loaded as a user of transformers loads it."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvmosaic.lab.eval.text.documents import Recipe, TextSource
from training.batches import Reading, Writer
from training.evaluate import MAIN, load_reader
from training.layout import STRATEGIES, Strategy
from training.measure import measure

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "kvmosaic" / "bundled" / "reader"
DOCUMENTS = [
    {"title": "Marla Denwick", "text": "Marla Denwick works as a baker. She lives in Tolbury and plays the cello."},
    {"title": "Jonas Kelberg", "text": "Jonas Kelberg works as a teacher. He lives in Halport and keeps a goat."},
    {"title": "Silver Heron", "text": "The Silver Heron was built in 1874. Its cargo is timber."},
]
QUESTIONS = {
    "Where does Jonas Kelberg live?": "Halport",
    "What is Marla Denwick's job?": "baker",
    "What does the Silver Heron carry?": "timber",
    "When was the Silver Heron built?": "1874",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "text",
    [
        "plain words, and 1874!",
        "  two  spaces\n\n\ttab ",
        "Grüße aus Köln",
        "日本語のテキスト",
        "🙂🏳️‍🌈 e\u0301",
        "a\x00b\x7f",
        "",
    ],
)
def test_tokenizer_gives_back_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_tokenizer_gives_back_random_unicode(tokenizer: PreTrainedTokenizerBase) -> None:
    random = Random(1)
    for _ in range(200):
        points = [
            random.choice(
                [random.randrange(32, 127), random.randrange(160, 0xD7FF), random.randrange(0x10000, 0x10FFFF)]
            )
            for _ in range(random.randint(1, 30))
        ]
        text = "".join(map(chr, points))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("in 1874.", add_special_tokens=False)[1:] == ["Ġ1", "8", "7", "4", "."]


def test_plain_text_starts_with_the_begin_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("Where?").input_ids[0] == tokenizer.bos_token_id


def test_chat_template_is_what_training_wrote(tokenizer: PreTrainedTokenizerBase) -> None:
    raw = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    source, writer = TextSource(2), Writer(raw, Random(2))
    for _ in range(20):
        example = source.example(Recipe())
        row = writer.row(example, Reading("causal"), 160)
        question, answered = row.blocks[0]
        messages = [{"role": "system", "content": example.system}] if example.system else []
        messages.append({"role": "user", "content": example.questions[row.asked[0]].text})
        documents = [{"title": d.title or "", "text": d.text} for d in example.documents]
        rendered = tokenizer.apply_chat_template(
            messages, documents=documents, add_generation_prompt=True, return_dict=False
        )
        assert rendered == row.tokens + question[:answered]


def test_chat_template_continues_over_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Two?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|user|>One?\n<|assistant|> yes<|end|><|user|>Two?\n<|assistant|>"


@pytest.mark.parametrize("question", QUESTIONS)
def test_reader_answers_with_transformers_generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str
) -> None:
    messages = [
        {"role": "system", "content": "Answer the question from the documents."},
        {"role": "user", "content": question},
    ]
    prompt = tokenizer.apply_chat_template(
        messages, documents=DOCUMENTS, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.strip() == QUESTIONS[question]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reader_answers_questions_about_held_out_names(strategy: Strategy) -> None:
    model, raw = load_reader(FOLDER)
    score = measure(model.answers, raw, lambda source: source.example(MAIN), Reading(strategy), 300, seed=11)
    assert score.accuracy >= 0.95


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_measured_accuracy_is_at_least_95_percent(strategy: Strategy) -> None:
    score = json.loads((FOLDER / "evaluation.json").read_text())["results"]["3-6 documents"][strategy]
    assert score["questions"] >= 1000
    assert score["right"] / score["questions"] >= 0.95


def test_package_folder_is_under_12_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12e6
