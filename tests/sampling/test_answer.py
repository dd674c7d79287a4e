import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import make_tokenizer

from kvmosaic.sampling import Answer, Finish, SamplingParams
from kvmosaic.sampling.sampler import SampledToken

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def answer_to(token_ids, tokenizer=TOKENIZER, room=None, **settings):
    """An answer after these tokens, or after as many as it took, and its text as it was streamed."""
    answer = Answer(SamplingParams(**settings), tokenizer, [EOS], max_tokens=room)
    streamed = []
    for token_id in token_ids:
        ended = answer.append(SampledToken(token_id))
        streamed.append(answer.take_text())
        if ended:
            break
    return answer, streamed


def test_an_answer_ends_with_the_end_of_sequence_token_and_without_its_text():
    answer, streamed = answer_to([*ids_of("a river"), EOS, *ids_of("more")], skip_special_tokens=False)
    output = answer.output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("a river", "stop", None)
    assert output.token_ids == (*ids_of("a river"), EOS)
    assert output.finished
    assert "".join(streamed) == "a river"


def test_a_stop_id_is_named_and_its_text_kept_only_if_asked():
    (comma,) = ids_of(",")
    text = ids_of("one, two")
    output = answer_to(text, stop_token_ids=[comma])[0].output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("one", "stop", comma)
    kept = answer_to(text, stop_token_ids=[comma], include_stop_str_in_output=True)[0].output()
    assert kept.text == "one,"


def test_a_stop_text_that_straddles_tokens_is_cut_and_never_streamed():
    answer, streamed = answer_to(ids_of("The river Aller. Question: what?"), stop=["Question:", "\n"])
    assert answer.finish == Finish("stop", "Question:")
    assert answer.output().text == "The river Aller. " == "".join(streamed)
    kept, streamed = answer_to(ids_of("The Question: what?"), stop="Question:", include_stop_str_in_output=True)
    assert kept.output().text == "The Question:" == "".join(streamed)


def test_a_stop_text_counts_only_after_min_tokens():
    ids = ids_of("a. b. c. d. e.")
    early = answer_to(ids, stop=".")[0].output()
    late = answer_to(ids, stop=".", min_tokens=len(ids) - 2)[0].output()
    assert early.text == "a"
    assert late.text.startswith("a. b.")
    assert late.finish_reason == "stop"


def test_length_ends_an_answer_and_a_stop_text_in_the_last_token_is_the_better_reason():
    ids = ids_of("one two three four")
    assert answer_to(ids, max_tokens=3)[0].output().finish_reason == "length"
    assert answer_to(ids, room=2)[0].output().token_ids == tuple(ids[:2])
    stopped = answer_to(ids_of("a."), stop=".", max_tokens=len(ids_of("a.")))[0].output()
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", ".")


def test_held_text_is_shown_when_the_answer_ends_otherwise():
    answer, streamed = answer_to(ids_of("what a Que"), stop="Question", max_tokens=len(ids_of("what a Que")))
    assert answer.output().text == "what a Que" == "".join(streamed)
    half = ids_of("☃")[:1]
    assert answer_to(half, max_tokens=1)[0].output().text == "�"


def test_an_unfinished_answer_shows_only_what_is_certain():
    answer, streamed = answer_to(ids_of("what a Que"), stop="Question")
    output = answer.output()
    assert output.text == "what a " == "".join(streamed)
    assert not output.finished
    answer.end("abort")
    assert answer.output().finish_reason == "abort"
    assert answer.output().text == "what a Que"
    answer.end("abort")
    assert answer.take_text() == "Que"


def test_without_a_tokenizer_ids_still_end_an_answer():
    output = answer_to([5, 6, EOS], tokenizer=None, stop="x")[0].output()
    assert (output.text, output.token_ids, output.finish_reason) == ("", (5, 6, EOS), "stop")


def test_logprobs_are_kept_per_token_and_summed():
    answer = Answer(SamplingParams(logprobs=2), TOKENIZER, [EOS], index=3)
    first, second, third = ids_of("a")[0], ids_of("b")[0], ids_of("c")[0]
    answer.append(SampledToken(first, -0.5, 1, ((first, -0.5), (second, -1.0))))
    answer.append(SampledToken(third, -3.0, 7, ((first, -0.2), (second, -2.0))))
    output = answer.output()
    assert output.index == 3
    assert output.cumulative_logprob == pytest.approx(-3.5)
    assert [list(entry) for entry in output.logprobs] == [[first, second], [third, first, second]]
    chosen = output.logprobs[1][third]
    assert (chosen.logprob, chosen.rank, chosen.decoded_token) == (-3.0, 7, "c")
    assert output.logprobs[1][second].rank == 2
    assert answer_to([first])[0].output().logprobs is None


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_the_text(text, stops):
    answer, streamed = answer_to(ids_of(text), stop=stops)
    answer.end("abort")
    assert "".join(streamed) + answer.take_text() == answer.output().text
    assert text.startswith(answer.output().text.rstrip("�"))
