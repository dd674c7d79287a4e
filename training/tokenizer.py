"""The reader's tokenizer: byte-level BPE, digits one by one, trained on generated text of the training split."""

from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvmosaic.lab.eval.text.documents import LISTS, Recipe, TextSource

VOCABULARY = 3072
PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, DOCUMENT, USER, ASSISTANT = "<|system|>", "<|document|>", "<|user|>", "<|assistant|>"
SPECIAL = [PAD, BEGIN, END, SYSTEM, DOCUMENT, USER, ASSISTANT]
# Contractions, words, single digits, punctuation and runs of space; a space before a word belongs to the word.
PATTERN = r"'(?:s|t|d|m|ll|ve|re)(?!\p{L})| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}; expected one trained by training/tokenizer.py")
    return int(found)


def training_text(seed: int, prompts: int) -> Iterator[str]:
    """The texts of generated prompts of the training split, and now and then all words that answers are made of."""
    source = TextSource(seed)
    recipe = Recipe(documents=(1, 6))
    vocabulary = " ".join(sorted({word for words in LISTS.values() for entry in words for word in entry.split("_")}))
    for number in range(prompts):
        if number % 10 == 0:
            yield " " + vocabulary
        example = source.example(recipe)
        if example.system:
            yield example.system
        for document in example.documents:
            yield f"{document.title}\n{document.text}" if document.title else document.text
        for question in example.questions:
            yield f"{question.text} {question.answer}"


def train_tokenizer(seed: int = 1, prompts: int = 20_000) -> Tokenizer:
    """A new tokenizer; the same arguments give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed, prompts), trainer)
    begin = token_id(tokenizer, BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    return tokenizer
