"""Chunks by hand: compute documents once, then put prompts together from their handles."""

from kvmosaic import LLM, Prompt, SamplingParams, Segment, SegmentKind

SYSTEM = "Answer the question from the documents."

with LLM("reader") as llm:
    town = llm.chunks.create("Fenbury was founded in 1642. It lies on the river Quinan.", name="town", system=SYSTEM)
    ship = llm.chunks.create("The Amber Pearl was built in 1907. It carries timber.", name="ship", system=SYSTEM)
    llm.chunks.pin("town")  # never evicted

    answers = []
    for first, second in [(town, ship), (ship, town)]:
        question = Segment(SegmentKind.QUESTION, text="When was the Amber Pearl built?")
        system = Segment(SegmentKind.SYSTEM, text=SYSTEM)
        prompt = Prompt((system, first.segment, second.segment, question))
        print(llm.plan(prompt, position_strategy="sequential"))  # one after the other: the second one is moved
        # where documents overlap, their order cannot matter
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16), position_strategy="shared")
        answers.append(output.outputs[0].text.strip())
        print(answers[-1], end="\n\n")
