"""Prompts as plain text: the separator ## splits them into system text, documents and question."""

from kvmosaic import LLM, SamplingParams

SYSTEM = "Answer the question from the documents."
FENBURY = "Fenbury was founded in 1642. It lies on the river Quinan. The mayor of Fenbury is Renna Velley."
BELLOS = "Bellos is a donkey. It lives in the boathouse. Bellos eats carrots."

prompts = [
    f"{SYSTEM} ## {FENBURY} ## {BELLOS} ## When was Fenbury founded?",
    f"{SYSTEM} ## {BELLOS} ## {FENBURY} ## What does Bellos eat?",
]

with LLM("reader") as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text.strip(), f"({output.num_cached_tokens} tokens from the cache)")
    print(llm.get_chunk_cache_stats())
