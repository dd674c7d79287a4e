import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.tokenizers import SENTENCES, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvmosaic.sampling import Detokenizer, decode_all


def byte_fallback():
    """As Llama 2: words with a sign for the space, and a token for every byte."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for word in ("▁", "▁a", "▁river", "s", "e", "t", "a"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def word_pieces():
    """As BERT: pieces inside a word begin with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]")


TOKENIZERS = {
    "byte_level": make_tokenizer(),
    "unigram": make_tokenizer(kind="unigram"),
    "byte_fallback": byte_fallback(),
    "word_pieces": word_pieces(),
}
TEXTS = [
    "Grüße aus Köln, ça va? ☃ наука 中文",
    "👩‍👩‍👧 a 👍🏽 river " * 6,
    " a  b   c ",
    "a",
    "ж" * 60,
    "a river's estate",
]


def stream(tokenizer, token_ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.append, token_ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_together_are_the_text_decoded_at_once(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == decode_all(tokenizer, ids)
    assert all("�" not in piece for piece in pieces)


@pytest.mark.parametrize("name", ["byte_level", "unigram", "word_pieces"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=examples(60))
@given(st.data())
def test_any_tokens_come_out_as_decoded_at_once(name, skip, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=120))
    pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == decode_all(tokenizer, ids, skip_special_tokens=skip)


@settings(max_examples=examples(60))
@given(st.text(max_size=60))
def test_half_characters_are_held_back(text):
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for token_id in ids:
        shown += detokenizer.append(token_id)
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


@settings(max_examples=examples(60))
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="�"), max_size=40))
def test_bytes_of_a_fallback_vocabulary_become_characters(text):
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [byte + 1 for byte in text.encode()]
    assert "".join(stream(tokenizer, ids)) == decode_all(tokenizer, ids)


def test_broken_text_is_shown_at_the_end():
    tokenizer = TOKENIZERS["byte_level"]
    first_half = tokenizer("☃", add_special_tokens=False)["input_ids"][:1]
    pieces = stream(tokenizer, [*tokenizer("a")["input_ids"], *first_half])
    assert pieces[-2:] == ["", "�"]


@pytest.mark.parametrize("broken", [False, True])
def test_each_token_decodes_a_short_window_only(broken):
    lengths = []

    class Counting:
        all_special_ids = ()

        def decode(self, ids, **options):
            lengths.append(len(ids))
            return TOKENIZERS["byte_level"].decode(ids, **options)

    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer("☃" if broken else " word", add_special_tokens=False)["input_ids"][-1:] * 1000
    stream(Counting(), ids)
    assert max(lengths) <= 65
    assert sum(lengths) / len(ids) < (90 if broken else 30)


def test_special_tokens_are_left_out_or_kept():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer("a <|im_end|> b", add_special_tokens=False)["input_ids"]
    assert "".join(stream(tokenizer, ids)) == "a  b"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == "a <|im_end|> b"


def test_without_a_tokenizer_there_is_no_text():
    assert stream(None, [1, 2, 3]) == ["", "", "", ""]
    assert decode_all(None, [1, 2]) == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), part_tokens=st.integers(16, 40))
@settings(max_examples=examples(60), deadline=None)
def test_parts_of_a_long_list_are_the_list_decoded_at_once(name, data, part_tokens):
    tokenizer = TOKENIZERS[name]
    texts = st.lists(st.sampled_from([*TEXTS, *SENTENCES]), min_size=1, max_size=8).map(" ".join)
    ids = data.draw(
        texts.map(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
        | st.lists(st.integers(0, len(tokenizer) - 1), max_size=200)
    )
    skip = data.draw(st.booleans())
    whole = decode_all(tokenizer, ids, skip_special_tokens=skip, part_tokens=10**9)
    assert decode_all(tokenizer, ids, skip_special_tokens=skip, part_tokens=part_tokens) == whole


def test_long_list_is_decoded_in_parts():
    tokenizer, lengths = TOKENIZERS["byte_level"], []

    class Counted:
        all_special_ids = tokenizer.all_special_ids

        def decode(self, token_ids, **options):
            lengths.append(len(token_ids))
            return tokenizer.decode(token_ids, **options)

    ids = tokenizer("The river is long. " * 200, add_special_tokens=False)["input_ids"]
    assert decode_all(Counted(), ids, part_tokens=100) == tokenizer.decode(ids)
    assert max(lengths) <= 116
