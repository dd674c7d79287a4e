"""Questions over documents, and the answers that are known to be right: asked on the quiet server before the load.

An answer is known if it is what the documents say, the same in two orders of the documents, and if no other token came
near it: rounding differs a little with what else is in a step, so that a near tie proves nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
from soak_server import QUIET, headers_of

NAMES = ("Marla Denwick", "Jonas Kelberg", "Talmira Varlow", "Torren Briwick", "Quinra Holmley", "Velna Strand")
TOWNS = ("Tolbury", "Halport", "Marhaven", "Fenbury", "Rosburg", "Linham")
JOBS = ("baker", "miller", "teacher", "doctor", "painter", "sailor")
NUM_QUESTIONS = 30
LEAST_KNOWN = 12
MARGIN = 0.5
"""Nats between a token of the answer and the next best one."""
MAX_TOKENS = 16
SYSTEM = "Answer from the documents."


def document(number: int, town: str | None = None) -> dict[str, str]:
    """What is written about a person; who moves away has another text."""
    name = NAMES[number]
    text = f"{name} works as a {JOBS[number]}. {name} lives in {town or TOWNS[number]}."
    return {"id": name.split()[0].lower(), "title": name, "text": text}


@dataclass(frozen=True)
class Question:
    """One, over documents in an order."""

    messages: tuple[tuple[str, str], ...]
    people: tuple[int, ...]
    strategy: str
    fact: str
    """What the documents say."""

    def body(self, documents: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """For /v1/chat/completions."""
        return {
            "messages": [{"role": role, "content": content} for role, content in self.messages],
            "documents": documents or [document(number) for number in self.people],
            "position_strategy": self.strategy,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }

    def response_body(self, documents: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The same for /v1/responses."""
        body = self.body(documents)
        body["input"], body["max_output_tokens"] = body.pop("messages"), body.pop("max_tokens")
        return body


@dataclass
class Known:
    """What is right."""

    answers: dict[Question, str] = field(default_factory=dict)
    moved: dict[tuple[int, str], str] = field(default_factory=dict)
    """By person and town: the answer over a document that says so."""
    num_asked: int = 0

    @property
    def questions(self) -> list[Question]:
        return list(self.answers)

    @property
    def conversations(self) -> list[Question]:
        """Those with more than one turn."""
        return [question for question in self.answers if len(question.messages) > 2]


def where(number: int) -> str:
    return f"Where does {NAMES[number]} live?"


def moved_question(number: int, town: str) -> Question:
    """About a person whose document may have been replaced."""
    return Question((("user", where(number)),), (number,), "sequential", town)


def questions(choose: Random) -> list[Question]:
    """Of all kinds: with and without a system text, in both strategies, and second turns of a conversation."""
    made = []
    for index in range(NUM_QUESTIONS):
        asked = choose.randrange(len(NAMES))
        people = [asked, *choose.sample([other for other in range(len(NAMES)) if other != asked], index % 3 + 1)]
        choose.shuffle(people)
        messages: tuple[tuple[str, str], ...] = (("user", where(asked)),)
        if index % 2:
            messages = (("system", SYSTEM), *messages)
        fact = TOWNS[asked]
        if index % 5 == 0:
            other = next(number for number in people if number != asked)
            messages = (*messages, ("assistant", f" {fact}"), ("user", where(other)))
            fact = TOWNS[other]
        made.append(Question(messages, tuple(people), "shared" if index % 3 else "sequential", fact))
    return made


def known_answers(url: str, seed: int) -> Known:
    """Asks all of them twice, one after the other.

    Raises:
        RuntimeError: hardly any answer is right, so there is nothing to compare with.
    """
    known = Known()
    with httpx.Client(base_url=url, headers=headers_of(QUIET), timeout=120) as client:
        asked = questions(Random(seed))
        moved = [(number, town) for number in range(3) for town in TOWNS]
        for question in asked:
            if (answer := _sure(client, question, [document(number) for number in question.people])) is not None:
                known.answers[question] = answer
        for number, town in moved:
            question = moved_question(number, town)
            if (answer := _sure(client, question, [document(number, town)])) is not None:
                known.moved[number, town] = answer
    known.num_asked = len(asked) + len(moved)
    people = {number for number, _ in known.moved}
    if len(known.answers) < LEAST_KNOWN or any(len(towns_of(known, number)) < 3 for number in people) or not people:
        raise RuntimeError(f"only {len(known.answers)} + {len(known.moved)} of {known.num_asked} answers are right")
    return known


def towns_of(known: Known, number: int) -> list[str]:
    """Cities whose answer is known."""
    return [town for person, town in known.moved if person == number]


def _sure(client: httpx.Client, question: Question, documents: list[dict[str, str]]) -> str | None:
    answers = []
    for order in (documents, documents[::-1] if question.strategy == "shared" else documents):
        body = question.body(list(order)) | {"logprobs": True, "top_logprobs": 2}
        reply = client.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"the quiet server refused a question: {reply.text}")
        choice = reply.json()["choices"][0]
        answers.append(choice["message"]["content"])
        if question.fact not in answers[-1] or _margin(choice) < MARGIN:
            return None
    return answers[0] if answers[0] == answers[1] else None


def _margin(choice: dict[str, Any]) -> float:
    tops = [
        sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True)
        for token in choice["logprobs"]["content"]
    ]
    return min((top[0] - top[1] for top in tops if len(top) > 1), default=0.0)


def response_text(reply: dict[str, Any]) -> str:
    """The answer in a reply of /v1/responses."""
    return "".join(part["text"] for item in reply["output"] for part in item["content"])


def event_data(line: str) -> dict[str, Any] | None:
    """What an event of a stream holds."""
    if not line.startswith("data: {"):
        return None
    data: dict[str, Any] = json.loads(line[6:])
    return data
