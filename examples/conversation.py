"""A conversation over documents that forks: every turn computes what is new in it, and nothing else."""

from pathlib import Path

from kvmosaic import LLM, SamplingParams

folder = Path(__file__).parent / "documents"
documents = [
    {"id": name, "text": (folder / f"{name}.txt").read_text()}
    for name in ("Amber Pearl", "Golden Anchor Museum", "Corlow Lighthouse")
]
greedy = SamplingParams(temperature=0, max_tokens=32)
start = [{"role": "system", "content": "Answer the question from the documents."}]

with LLM("reader") as llm:

    def ask(conversation, question):
        """The conversation with one more question and its answer; prints what the turn computed."""
        conversation = [*conversation, {"role": "user", "content": question}]
        (output,) = llm.chat(conversation, greedy, documents=documents)
        answer, asked = output.outputs[0].text.strip(), output.reuse.segments[-1]
        print(f"{question} {answer}")
        print(f"    computed {output.reuse.computed_tokens} of {output.reuse.num_tokens} tokens; {asked.note or 'new'}")
        return [*conversation, {"role": "assistant", "content": answer}]

    first = ask(start, "What does the Amber Pearl carry?")
    second = ask(first, "How high is the Corlow Lighthouse?")
    third = ask(second, "What does the museum show?")
    fork = ask(first, "Who owns the Amber Pearl?")
