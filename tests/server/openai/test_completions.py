from __future__ import annotations

from operator import itemgetter

import pytest
from support.asking import DOCUMENTS, GREEDY, QUESTION, chunks, post, refused

ROUTE = "/v1/completions"
PROMPTS = ["The ferry goes to", "The mill grinds", "The zoo has three"]


def complete(http, prompt=PROMPTS[0], **fields):
    return post(http, ROUTE, **{"prompt": prompt, **GREEDY, **fields})


def texts(reply):
    return [choice["text"] for choice in reply["choices"]]


def streamed(http, prompt=PROMPTS[0], **fields):
    events = chunks(http, ROUTE, **{"prompt": prompt, **GREEDY, **fields})
    found: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)], events


def test_reply_has_openais_shape(http, server):
    reply = complete(http)
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert reply["model"] == server.model
    (choice,) = reply["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + 8
    assert post(http, ROUTE, prompt="a", ignore_eos=True)["usage"]["completion_tokens"] == 16
    assert complete(http, max_tokens=None)["usage"]["completion_tokens"] == 16


def test_answer_is_that_of_the_python_face(http, server):
    from kvmosaic import SamplingParams

    prompt = server.llm.encoder.encode(PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def answer():
        deltas = [delta async for delta in server.services.engine.generate(prompt, params)]
        return "".join(answer.text for delta in deltas for answer in delta.answers)

    assert texts(complete(http)) == [server.call(answer)]


def test_texts_and_their_token_ids_are_answered_alike(http):
    ids = [post(http, "/tokenize", prompt=prompt)["tokens"] for prompt in PROMPTS]
    expected = [texts(complete(http, prompt))[0] for prompt in PROMPTS]
    assert texts(complete(http, ids[0])) == expected[:1]
    assert texts(complete(http, ids)) == texts(complete(http, PROMPTS)) == expected


def test_several_prompts_are_streamed_with_their_numbers(http):
    fields = {"n": 2, "temperature": 2.0, "seed": 5}
    whole = complete(http, PROMPTS, **fields)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    found, events = streamed(http, PROMPTS, **fields)
    assert found == texts(whole)
    assert [event for event in events if "kvmosaic" in event] == [events[-1]]
    assert {segment["prompt_index"] for segment in events[-1]["kvmosaic"]["segments"]} == {0, 1, 2}


def test_usage_of_several_prompts_adds_up(http):
    ids = [post(http, "/tokenize", prompt=prompt)["count"] for prompt in PROMPTS]
    usage = complete(http, PROMPTS)["usage"]
    assert usage["prompt_tokens"] == sum(ids) == sum(usage["prompt_tokens_details"].values())
    assert usage["completion_tokens"] == 24
    _, events = streamed(http, PROMPTS, stream_options={"include_usage": True})
    assert events[-1]["usage"]["completion_tokens"] == 24 and events[-1]["choices"] == []


def test_prompt_is_echoed(http):
    plain = complete(http, PROMPTS)
    assert texts(complete(http, PROMPTS, echo=True)) == [a + b for a, b in zip(PROMPTS, texts(plain), strict=True)]
    assert streamed(http, PROMPTS, echo=True)[0] == texts(complete(http, PROMPTS, echo=True))


def likelihoods_as_lm_eval_reads_them(reply, lengths):
    """Sum and greediness of continuations: `LocalCompletionsAPI.parse_logprobs` of lm-evaluation-harness."""
    found = []
    for choice, length in zip(sorted(reply["choices"], key=itemgetter("index")), lengths, strict=True):
        logprobs = choice["logprobs"]
        values, top = (logprobs[name][length:-1] for name in ("token_logprobs", "top_logprobs"))
        found.append((sum(values), all(value == max(one.values()) for value, one in zip(values, top, strict=True))))
    return found


def test_lm_eval_reads_the_likelihood_of_continuations(http, server):
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    ids = [post(http, "/tokenize", prompt=prompt)["tokens"] for prompt in PROMPTS]
    reply = post(http, ROUTE, model=server.model, prompt=ids, **asked)
    lengths = [len(prompt) - number for number, prompt in enumerate(ids, start=1)]
    found = likelihoods_as_lm_eval_reads_them(reply, lengths)
    for prompt, length, (total, is_greedy) in zip(ids, lengths, found, strict=True):
        forced = [
            complete(http, prompt[:place], max_tokens=1, logprobs=1, logit_bias={str(prompt[place]): 100})
            for place in range(length, len(prompt))
        ]
        steps = [choice["logprobs"] for step in forced for choice in step["choices"]]
        assert total == pytest.approx(sum(step["token_logprobs"][0] for step in steps), abs=1e-4)
        assert is_greedy == all(len(step["top_logprobs"][0]) == 1 for step in steps)
    for choice in reply["choices"]:
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert "".join(logprobs["tokens"]) == choice["text"]
    assert reply["usage"]["completion_tokens"] == 3


def test_an_echo_with_logprobs_needs_no_answer(http):
    scored = complete(http, PROMPTS, echo=True, logprobs=2, max_tokens=0)
    longer = complete(http, PROMPTS, echo=True, logprobs=2, max_tokens=2)
    for short, long, prompt in zip(scored["choices"], longer["choices"], PROMPTS, strict=True):
        assert short["text"] == prompt and short["finish_reason"] == "length"
        number = len(short["logprobs"]["tokens"])
        assert {name: values[:number] for name, values in long["logprobs"].items()} == short["logprobs"]
        assert len(long["logprobs"]["tokens"]) == number + 2
    assert scored["usage"]["completion_tokens"] == 0
    (choice,) = complete(http, [5], echo=True, logprobs=0, max_tokens=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None] and choice["text"]


@pytest.mark.slow
def test_a_bias_bans_a_token_or_lets_it_always_come(http):
    likely = complete(http, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    (banned,) = set(post(http, "/tokenize", prompt=likely[0], add_special_tokens=False)["tokens"])
    biased = complete(http, logprobs=0, logit_bias={str(banned): -100})["choices"][0]["logprobs"]
    assert likely[0] not in biased["tokens"]
    always = complete(http, logprobs=0, temperature=1, logit_bias={str(banned): 100})["choices"][0]["logprobs"]
    assert set(always["tokens"]) == {likely[0]}
    assert always["token_logprobs"][0] != 0  # the model's own
    error = refused(http, ROUTE, prompt=PROMPTS[0], logit_bias={"2000000000": 1})
    assert error["status"] == 400 and "logit_bias has the token id 2000000000" in error["message"]


def test_documents_stand_before_the_prompt(http):
    cold = complete(http, QUESTION, documents=DOCUMENTS, cache_salt="completions")
    warm = complete(http, QUESTION, documents=DOCUMENTS[::-1], cache_salt="completions")
    assert [document["action"] for document in warm["kvmosaic"]["documents"]] == ["reused"] * 3
    assert texts(cold) == texts(warm)


def test_logprobs_are_in_the_older_shape(http):
    (choice,) = complete(http, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {8}
    assert "".join(logprobs["tokens"]) == choice["text"]
    ends = [offset + len(token) for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    assert logprobs["text_offset"] == [0, *ends[:-1]]
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value == max(top.values()) and 1 <= len(top) <= 2
    events = streamed(http, logprobs=2)[1]
    parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    for name, values in logprobs.items():
        assert [value for part in parts for value in part[name]] == values
    assert complete(http, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 2}, "best_of", "only equal ones"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "leave stream out"),
        ({"echo": True, "logprobs": 1, "documents": ["a"]}, "echo", "without documents"),
        ({"echo": True, "logprobs": 20, "prompt": [5] * 900, "n": 16}, None, "log probabilities, at most 262144"),
        ({"prompt": [PROMPTS[0]] * 256, "n": 3}, "n", "at most 512"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [[]]}, "prompt", ""),
        ({"prompt": [1, "a"]}, "prompt.1", "integer"),
        ({"prompt": [10**6]}, None, "token 0"),
        ({"prompt": ""}, None, "empty"),
        ({"prompt": [1, 2], "documents": ["a"]}, None, "prompt of text"),
        ({"max_tokens": 0}, "max_tokens", "at least 1 without echo and logprobs"),
        ({"max_tokens": -2}, "max_tokens", "greater than or equal to -1"),
        ({"prompt": None}, None, ""),
    ],
)
def test_what_cannot_be_done_is_refused(http, fields, param, message):
    error = refused(http, ROUTE, **{"prompt": PROMPTS[0], **fields})
    assert error["status"] == 400 and error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert param is None or error["param"].startswith(param)


def test_best_of_n_is_n(http):
    assert len(complete(http, n=2, best_of=2)["choices"]) == 2
