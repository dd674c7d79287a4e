"""First token after an edit: a long document, edited near its end, whole and in sections.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/edits.py MODEL --tokens 4000 --runs 3

CPU time of all threads of a request with one new token, so that other work of the machine does not count. The document
is prose of 20 headings; the edit is one sentence in its last tenth. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

from facts import save

from kvmosaic import LLM, ChunkCacheConfig, SamplingParams

WORDS = "the ferry leaves early every island morning with boats from town that carry people bread and letters".split()
NUM_SECTIONS = 20
PARAMS = SamplingParams(temperature=0, max_tokens=1)


def sections_of(num_words: int, chance: random.Random) -> list[str]:
    """A text of random words, with a heading for each section."""
    sections = []
    for number in range(NUM_SECTIONS):
        sentences = [" ".join(chance.choices(WORDS, k=12)).capitalize() + "." for _ in range(num_words // 12)]
        paragraphs = [" ".join(sentences[first : first + 5]) for first in range(0, len(sentences), 5)]
        sections.append(f"## Part {number}\n\n" + "\n\n".join(paragraphs) + "\n\n")
    return sections


def ask(llm: LLM, text: str) -> tuple[float, int, int]:
    """CPU seconds of the first token, and the document's tokens and reused tokens."""
    messages = [{"role": "user", "content": "When does the ferry leave?"}]
    began = time.process_time()
    (answer,) = llm.chat(messages, PARAMS, documents=[{"text": text, "id": "guide"}])
    seconds = time.process_time() - began
    chunks = [segment for segment in answer.reuse.segments if segment.kind == "chunk"]
    return seconds, sum(chunk.num_tokens for chunk in chunks), sum(chunk.reused_tokens for chunk in chunks)


def measure(model: str, long_chunks: str, num_words: int, num_runs: int) -> dict[str, float]:
    """Medians over several documents."""
    config = ChunkCacheConfig(long_chunks=long_chunks, chunk_cache_size="2GiB", repair="none")  # type: ignore[arg-type]
    rows = []
    with LLM(model, chunk_cache_config=config) as llm:
        ask(llm, "The first request is slower than all others.")
        for seed in range(num_runs):
            sections = sections_of(num_words // NUM_SECTIONS, random.Random(seed))
            edited = sections.copy()
            edited[-2] = edited[-2].rstrip() + " The last one is late today.\n\n"
            cold, tokens, _ = ask(llm, "".join(sections))
            unedited, _, _ = ask(llm, "".join(sections))
            after, _, kept = ask(llm, "".join(edited))
            rows.append((tokens, kept, cold, after, unedited))
    names = ("tokens", "kept_tokens", "cold_seconds", "edited_seconds", "unedited_seconds")
    return {name: round(median(column), 3) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4_000, help="about so many tokens of the document")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--name", default="edits", help="name of the result")
    given = parser.parse_args()
    ways = ("error", "sections")
    report = {way: measure(given.model, way, int(given.tokens / 1.15), given.runs) for way in ways}
    for way, row in report.items():
        print(way, row)
    print(save(given.name, {"model": given.model.rstrip("/").split("/")[-1], "long_chunks": report}))


if __name__ == "__main__":
    main()
