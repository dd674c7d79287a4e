"""The reader with layers that keep a state: its training model is the Qwen3.5 of transformers, however it reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.hybrid import composed_logits
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvmosaic import LLM, SamplingParams
from kvmosaic.lab.eval.tasks import OneHop
from training.evaluate import load_reader
from training.export import export
from training.model import Reader, ReaderConfig
from training.start import initialise

from .test_model import batch_of, tokens

pytestmark = pytest.mark.slow
SMALL = ReaderConfig(hidden=64, layers=3, intermediate=96, delta_layers=(0, 1))
RELEASE = Path(__file__).parents[2] / "release"
TOKENIZER = RELEASE / "causal-reader" / "tokenizer.json"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of random weights, which `export` rounds to bfloat16."""
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    model = Reader(SMALL)
    initialise(model)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    export(folder, TOKENIZER, folder, SMALL)
    return folder


@pytest.fixture(scope="module")
def reader(exported: Path) -> Reader:
    return load_reader(exported)[0]


@pytest.fixture(scope="module")
def qwen(exported: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64).eval()


def test_causal_logits_equal_transformers(reader: Reader, qwen: PreTrainedModel) -> None:
    system, first, second, question = tokens(1, 5, 12, 9, 7)
    with torch.no_grad():
        theirs = qwen(torch.tensor([system + first + second + question])).logits[0, -len(question) :]
        for reader.is_causal in (False, True):
            ours = reader.logits(batch_of([system, first, second], question, "causal"))
            torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)
    reader.is_causal = False


def test_shared_logits_equal_the_composed_states_of_transformers(reader: Reader, qwen: PreTrainedModel) -> None:
    system, first, second, question = tokens(2, 5, 12, 2, 7)
    with torch.no_grad():
        ours = reader.logits(batch_of([system, first, second], question, "shared"))
    theirs = composed_logits(qwen, system, [first, second], question, len(system) + len(first))
    torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        other = reader.logits(batch_of([system, second, first], question, "shared"))
    assert (ours - other).abs().max() > 1e-3, "states know which document came last"


def test_questions_do_not_see_each_other_and_padding_is_not_seen(reader: Reader) -> None:
    system, document, one, other = tokens(3, 4, 11, 6, 5)
    both = batch_of([system, document], one + other, "sequential")
    both.segments[0, -len(other) :] = 2
    for positions in (both.local, both.moved):
        positions[0, -len(other) :] = positions[0, -len(one + other)] + torch.arange(len(other))
    with torch.no_grad():
        together = reader.logits(both)
        apart = [reader.logits(batch_of([system, document], each, "sequential")) for each in (one, other)]
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-4, rtol=1e-4)


def test_the_released_hybrid_answers_from_documents_whose_states_are_composed() -> None:
    with LLM(RELEASE / "hybrid-reader", profile=False) as llm:
        right = 0
        for case in OneHop(4).cases(3, 12):
            documents = [{"text": each.text, "title": each.title} for each in case.documents]
            said = [{"role": "system", "content": case.system or ""}, {"role": "user", "content": case.question}]
            params = SamplingParams(temperature=0, max_tokens=16, repair="none")
            for order in (documents, documents[::-1]):
                (output,) = llm.chat(said, params, documents=order)
                right += output.outputs[0].text.strip() in case.answers
            assert any(segment.action in ("moved", "reused") for segment in output.reuse.segments)
    assert right >= 22
