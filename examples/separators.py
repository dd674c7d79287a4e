"""Prompts as plain text: a separator of your choice splits them into system text, documents and question."""

from kvmosaic import LLM, ChunkCacheConfig, Prompt, SamplingParams

SYSTEM = "Answer the question from the documents."
FENBURY = "Fenbury was founded in 1642. It lies on the river Quinan. The mayor of Fenbury is Renna Velley."
BELLOS = "Bellos is a donkey. It lives in the boathouse. Bellos eats carrots."

prompts = [
    f"{SYSTEM} ## {FENBURY} ## {BELLOS} ## When was Fenbury founded?",
    f"{SYSTEM} ## {BELLOS} ## {FENBURY} ## What does Bellos eat?",
]

greedy = SamplingParams(temperature=0, max_tokens=16)
with LLM(
    "reader", chunk_cache_config=ChunkCacheConfig(chunk_separator="##")
) as llm:  # without it, a text is never split
    for output in llm.generate(prompts, greedy):
        print(output.outputs[0].text.strip(), f"({output.num_cached_tokens} tokens from the cache)")
    prompt = Prompt.from_text(
        f"{SYSTEM} <next> {BELLOS} <next> Where does Bellos live?", "<next>"
    )  # of this prompt only
    (output,) = llm.generate(prompt, greedy)
    print(output.outputs[0].text.strip(), f"({output.num_cached_tokens} tokens from the cache)")
    print(llm.get_chunk_cache_stats())
