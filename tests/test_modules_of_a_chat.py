"""How many own modules, and how deep a stack, one cached `llm.chat` goes through: what a reader must follow."""

from __future__ import annotations

from support.modules_run import ModulesRun, max_modules

from kvmosaic import LLM, SamplingParams

MAX_DEPTH = 20
DOCUMENTS = [
    {"id": "fenbury", "text": "Fenbury was founded in 1642. It lies on the river Quinan."},
    {"id": "bellos", "text": "Bellos is a donkey. It lives in the boathouse."},
]
MESSAGES = [
    {"role": "system", "content": "Answer the question from the documents."},
    {"role": "user", "content": "When was Fenbury founded?"},
]


def test_a_cached_chat_can_be_followed() -> None:
    llm, params = LLM("reader", dtype="float32"), SamplingParams(temperature=0, max_tokens=8)
    for _ in range(2):
        llm.chat(MESSAGES, params, documents=DOCUMENTS)
    with ModulesRun() as run:
        run.is_recording = True
        (output,) = llm.chat(MESSAGES, params, documents=DOCUMENTS[::-1])
        run.is_recording = False
    assert sum(segment.reused_tokens > 0 for segment in output.reuse.segments) >= 3
    assert len(run.modules) <= max_modules("python"), sorted(run.modules)
    assert len(run.deepest) <= MAX_DEPTH, "\n".join(run.deepest)
