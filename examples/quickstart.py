"""Two questions about the same documents in another order: the second one computes no document."""

from pathlib import Path

from kvmosaic import LLM, SamplingParams

folder = Path(__file__).parent / "documents"
ferry, museum, lighthouse = (
    {"id": name, "text": (folder / f"{name}.txt").read_text()}
    for name in ("Amber Pearl", "Golden Anchor Museum", "Corlow Lighthouse")
)
system = {"role": "system", "content": "Answer the question from the documents."}
greedy = SamplingParams(temperature=0, max_tokens=32)

with LLM("reader") as llm:
    for question, documents in [
        ("What does the Amber Pearl carry?", [ferry, museum, lighthouse]),
        ("How high is the Corlow Lighthouse?", [lighthouse, ferry, museum]),
    ]:
        (answer,) = llm.chat([system, {"role": "user", "content": question}], greedy, documents=documents)
        print(question, answer.outputs[0].text.strip())
        print(answer.reuse, end="\n\n")
