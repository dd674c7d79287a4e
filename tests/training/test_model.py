from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from kvmosaic.lab.eval.text.documents import Recipe, TextSource
from kvmosaic.lab.eval.text.recipes import ChainRecipe, chain_example
from training.batches import Reading, Shape, Writer, collate
from training.curriculum import STAGES, copying_row, draw_reading, draw_row, stage_at
from training.grow import grow
from training.layout import STRATEGIES, Strategy, place
from training.model import PAD_SEGMENT, Batch, Reader, ReaderConfig
from training.pointers import HOP_LAYER, find_source, make_pointers

SMALL = ReaderConfig(vocabulary=300, hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96)


@pytest.fixture(scope="module")
def reader() -> Reader:
    torch.manual_seed(0)
    model = Reader(SMALL, torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def llama(reader: Reader) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=SMALL.vocabulary,
        hidden_size=SMALL.hidden,
        intermediate_size=SMALL.intermediate,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head_size,
        rms_norm_eps=SMALL.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": SMALL.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(reader.state_dict(), strict=False)
    assert set(missing) == {"lm_head.weight"}
    assert not unexpected
    return model.eval()


def batch_of(context: list[list[int]], question: list[int], strategy: Strategy, sees_system: bool = True) -> Batch:
    """One row with one question block; every question token is chosen."""
    positions = place(len(context[0]), [len(one) for one in context[1:]], strategy, sees_system)
    segments = [index for index, segment in enumerate(context) for _ in segment]
    flat = [token for segment in context for token in segment]
    start, stop = len(flat), len(flat) + len(question)
    asked = list(range(positions.question, positions.question + len(question)))
    return Batch(
        torch.tensor([flat + question]),
        torch.tensor([positions.local + asked]),
        torch.tensor([positions.moved + asked]),
        torch.tensor([segments + [1] * len(question)]),
        torch.tensor([strategy == "causal"]),
        torch.tensor([sees_system]),
        torch.arange(start, stop),
        torch.zeros(len(question), dtype=torch.long),
        torch.ones(len(question)),
        start,
        make_pointers([], 1, start),
        make_pointers([], 1, start),
    )


def tokens(seed: int, *lengths: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(SMALL.vocabulary) for _ in range(length)] for length in lengths]


def test_causal_logits_equal_transformers(reader: Reader, llama: LlamaForCausalLM) -> None:
    system, first, second, question = tokens(1, 5, 12, 9, 7)
    with torch.no_grad():
        ours = reader.logits(batch_of([system, first, second], question, "causal"))
        theirs = llama(torch.tensor([system + first + second + question])).logits[0, -len(question) :]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_shared_logits_equal_transformers_with_mask_and_positions(reader: Reader, llama: LlamaForCausalLM) -> None:
    system, first, second, question = tokens(2, 5, 12, 9, 7)
    batch = batch_of([system, first, second], question, "shared")
    length = batch.tokens.shape[1]
    mask = torch.ones(length, length).tril().bool()
    mask[5 + 12 : 5 + 12 + 9, 5 : 5 + 12] = False
    bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        ours = reader.logits(batch)
        theirs = llama(batch.tokens, attention_mask=bias, position_ids=batch.local).logits[0, -len(question) :]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_sequential_with_one_document_equals_causal(reader: Reader) -> None:
    system, document, question = tokens(3, 4, 11, 6)
    with torch.no_grad():
        moved = reader.logits(batch_of([system, document], question, "sequential"))
        plain = reader.logits(batch_of([system, document], question, "causal"))
    torch.testing.assert_close(moved, plain)


def test_order_of_documents_cannot_matter_in_shared(reader: Reader) -> None:
    system, first, second, question = tokens(4, 4, 11, 8, 6)
    with torch.no_grad():
        one = reader.logits(batch_of([system, first, second], question, "shared"))
        other = reader.logits(batch_of([system, second, first], question, "shared"))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_documents_without_system_are_moved_as_a_whole(reader: Reader) -> None:
    """A document read alone from position 0 and then moved is the document read alone at its new position."""
    system, document, question = tokens(5, 6, 10, 5)
    batch = batch_of([system, document], question, "sequential", sees_system=False)
    assert batch.local[0, 6:16].tolist() == list(range(10))
    in_place = Batch(**{**vars(batch), "local": batch.moved})
    with torch.no_grad():
        torch.testing.assert_close(reader.logits(batch), reader.logits(in_place), atol=1e-4, rtol=1e-4)


def test_places_of_the_three_strategies() -> None:
    assert place(2, [3, 2], "causal").moved == [0, 1, 2, 3, 4, 5, 6]
    shared = place(2, [3, 2], "shared")
    assert (shared.local, shared.moved, shared.question) == ([0, 1, 2, 3, 4, 2, 3], [0, 1, 2, 3, 4, 2, 3], 5)
    sequential = place(2, [3, 2], "sequential")
    assert (sequential.local, sequential.moved) == ([0, 1, 2, 3, 4, 2, 3], [0, 1, 2, 3, 4, 5, 6])
    assert sequential.question == 7
    assert place(2, [3, 2], "sequential", gaps=[10, 20, 5]).moved == [0, 1, 12, 13, 14, 35, 36]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(
        str(Path(__file__).parents[2] / "src" / "kvmosaic" / "bundled" / "reader" / "tokenizer.json")
    )


def test_questions_of_one_row_do_not_see_each_other(reader: Reader) -> None:
    random = Random(3)
    row = copying_row(random, draw_reading(random, STAGES["reader"][0], STRATEGIES))
    for tokens_of_block, _ in row.blocks:
        tokens_of_block[:] = [token % SMALL.vocabulary for token in tokens_of_block]
    row.tokens = [token % SMALL.vocabulary for token in row.tokens]
    shape = Shape(1, 96, 96)
    together, spans = collate([row], shape, random, 0, 0.0)
    row.blocks = row.blocks[:1]
    alone, _ = collate([row], shape, random, 0, 0.0)
    count = spans[0][2]
    with torch.no_grad():
        torch.testing.assert_close(reader.logits(together)[:count], reader.logits(alone)[:count], atol=1e-4, rtol=1e-4)


def test_padding_is_never_a_target() -> None:
    random = Random(2)
    rows = [copying_row(random, Reading("shared")) for _ in range(2)]
    batch, _ = collate(rows, Shape(3, 96, 96), random, 0, 0.1)
    real = batch.weights > 0
    assert (batch.segments.flatten()[batch.chosen[real]] != PAD_SEGMENT).all()


def test_source_of_an_answer_is_the_one_place_where_it_stands() -> None:
    assert find_source([5, 6, 7, 8], [6, 7], 10) == [11, 12]
    assert find_source([5, 6, 7, 6, 7], [6, 7], 10) == [-1, -1]
    assert find_source([9, 7, 8], [6, 7, 8], 10) == [10, 11, 12]


def test_curricula_begin_at_once_and_their_shares_fit() -> None:
    for stages in STAGES.values():
        assert stage_at(0, stages) is stages[0] and stage_at(10**6, stages) is stages[-1]
        for one in stages:
            shares = (one.drill, one.pronoun_drill, one.chains, one.stories, one.orders, one.needles, one.cuts)
            assert sum(shares) + one.copying < 1


def test_tasks_that_depend_on_order_are_never_read_at_shared_positions(tokenizer: Tokenizer) -> None:
    random = Random(4)
    stage = replace(STAGES["reader"][-1], chains=0, stories=0.4, orders=0.3, cuts=0.2)
    stage = replace(stage, drill=0, pronoun_drill=0, needles=0)
    rows = [draw_row(random, TextSource(seed), Writer(tokenizer, random), stage, STRATEGIES) for seed in range(40)]
    shared = [row for row in rows if row.reading.strategy == "shared"]
    assert len(shared) < 12, "only the tenth that is drawn from the recipe may be"


def test_a_cut_text_has_the_tokens_of_the_whole(tokenizer: Tokenizer) -> None:
    example = TextSource(1).example(Recipe(documents=(3, 3)))
    writer = Writer(tokenizer, Random(1))
    cut, whole = (writer.row(example, Reading("causal", cut=length), 160) for length in (16, 10**6))
    assert cut.tokens == whole.tokens and cut.sources == whole.sources
    assert max(whole.segments) == 1 and max(cut.segments) == -(-whole.segments.count(1) // 16)
    assert all(cut.segments.count(number) <= 16 for number in range(1, max(cut.segments) + 1))


def test_answers_over_two_hops_point_at_the_name_between_and_at_the_answer(tokenizer: Tokenizer) -> None:
    example = chain_example(TextSource(3), ChainRecipe(one_hop=0.0))
    row = Writer(tokenizer, Random(1)).row(example, Reading("causal"), 224)
    assert row.bridges and len(row.bridges) == len(row.sources) == len(row.blocks)
    for asked, bridges, sources in zip(row.asked, row.bridges, row.sources, strict=True):
        question = example.questions[asked]
        assert question.bridge is not None
        if bridges[0] >= 0:
            named = row.segments[bridges[0]]
            assert named == question.bridge.document + 1
            assert question.bridge.text.endswith(tokenizer.decode(row.tokens[bridges[0] : bridges[0] + 1]).strip())
        assert all(place < 0 or row.segments[place] == question.document + 1 for place in sources)


def test_a_grown_reader_gives_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    small = Reader(replace(SMALL, layers=HOP_LAYER + 1), torch.float32)
    for parameter in small.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_file(dict(small.state_dict()), tmp_path / "model.safetensors")
    grown = Reader(replace(SMALL, layers=HOP_LAYER + 2), torch.float32)
    grow(grown, tmp_path)
    batch = batch_of(tokens(7, 5, 12, 9), tokens(8, 6)[0], "shared")
    with torch.no_grad():
        torch.testing.assert_close(grown.eval().logits(batch), small.eval().logits(batch))
    with pytest.raises(ValueError, match="one layer less"):
        grow(Reader(replace(SMALL, layers=HOP_LAYER + 3)), tmp_path)
