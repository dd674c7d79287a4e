"""Histories of coding agents: what is computed after edits, beside prefix caching; and the first token after one.

    python benchmarks/agents.py                       # counts of tokens, and a plot: ten minutes
    python benchmarks/agents.py --time MODEL          # first token after the oldest of nine turns was dropped
    python benchmarks/agents.py --answers MODEL       # right answers over results that were read apart

Counts: agents read, search, edit and test the files of a folder, and compact their history by three policies (drop the
oldest turns, clear old results of tools, summarize); then sub-agents read the same files with other tasks. Every
request is answered by the engine with a tiny random model, whose caches lose nothing. Beside it prefix caching; prefix
caching with all results first, sorted, each once: what is reused then was read in another order; and what llama.cpp's
server does with `--cache-reuse 256`: it moves runs of the last prompt, which saw what has been dropped.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from facts import RESULTS, save
from rich.progress import track
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams
from kvmosaic.model import LoadedModel

ROOT = Path(__file__).resolve().parents[1]
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
Message = dict[str, Any]
Turn = tuple[Message, Message]
SYSTEM = {
    "role": "system",
    "content": "You are a coding agent. Read files, edit them, run the tests, and answer briefly.",
}
MAX_CHARACTERS, KEPT_TURNS = 60_000, 6
MOVED = "llama.cpp --cache-reuse"


class Agent:
    """Turns over the files of a folder, as an agent makes them."""

    def __init__(self, files: dict[str, str], seed: int) -> None:
        self._files = dict(files)
        self._chance = Random(seed)
        self._count = 0

    def turn(self) -> Turn:
        """The next call of a tool and its result."""
        kind = self._chance.choices(("read", "search", "edit", "test"), (5, 2, 2, 1))[0]
        name = self._chance.choice(sorted(self._files)[:40])
        return getattr(self, f"_{kind}")(name)

    def _read(self, name: str) -> Turn:
        return self._called("read", name, f"I read {name}.", self._files[name][:6_000])

    def _search(self, name: str) -> Turn:
        word = self._chance.choice([each for each in self._files[name].split() if each.isidentifier()])
        hits = [
            f"{path}:{number}:{line.strip()}"
            for path, text in self._files.items()
            for number, line in enumerate(text.splitlines(), start=1)
            if word in line
        ]
        return self._called("search", word, f"Where is {word} used?", "\n".join(hits[:40]))

    def _edit(self, name: str) -> Turn:
        lines = self._files[name].splitlines()
        place = self._chance.randrange(len(lines))
        lines[place:place] = [f"# edited {self._chance.randrange(10**6)}"]
        self._files[name] = "\n".join(lines)
        return self._called("edit", name, f"I add a line to {name}, at line {place}.", f"{name} was written.")

    def _test(self, name: str) -> Turn:
        log = "\n".join(f"tests/test_{self._chance.choice('abcdefgh')}{n}.py passed" for n in range(30))
        return self._called("test", name, "I run the tests.", log)

    def _called(self, tool: str, argument: str, said: str, result: str) -> Turn:
        self._count += 1
        return (
            {"role": "assistant", "content": f"{said} (step {self._count})"},
            {"role": "tool", "tool_call_id": f"c{self._count}", "name": tool, "content": f"{result}\n"},
        )


def dropped(turns: list[Turn]) -> list[Turn]:
    return turns[len(turns) // 2 :]


def cleared(turns: list[Turn]) -> list[Turn]:
    old = [(call, {**result, "content": "(cleared)"}) for call, result in turns[:-KEPT_TURNS]]
    return [*old, *turns[-KEPT_TURNS:]]


def summarized(turns: list[Turn]) -> list[Turn]:
    half = len(turns) // 2
    said = " ".join(call["content"] for call, _ in turns[:half])
    summary = {"role": "assistant", "content": f"So far: {said[:600]}"}
    return [(summary, {"role": "tool", "tool_call_id": "c0", "content": "(summarized)"}), *turns[half:]]


POLICIES: dict[str, Callable[[list[Turn]], list[Turn]]] = {
    "drop the oldest half": dropped,
    "clear old results": cleared,
    "summarize the oldest half": summarized,
}


def messages_of(turns: list[Turn], task: str) -> list[Message]:
    return [SYSTEM, {"role": "user", "content": task}, *(message for turn in turns for message in turn)]


def session(files: dict[str, str], compact: Callable[[list[Turn]], list[Turn]], seed: int, steps: int) -> Iterator[Any]:
    """Requests of one session, and whether the history was compacted before them."""
    agent, turns = Agent(files, seed), list[Turn]()
    for _ in range(steps):
        turns.append(agent.turn())
        is_compacted = sum(len(message["content"]) for turn in turns for message in turn) > MAX_CHARACTERS
        if is_compacted:
            turns = compact(turns)
        yield is_compacted, messages_of(turns, "Find what is slow in this project, and mend it.")


def sub_agents(files: dict[str, str], seed: int, count: int) -> Iterator[Any]:
    """Requests of agents with other tasks over the same files, each in an order of its own."""
    chance, agent = Random(seed), Agent(files, seed)
    turns = [agent._read(name) for name in chance.sample(sorted(files)[:40], 8)]
    for number in range(count):
        chance.shuffle(turns)
        yield number > 0, messages_of(turns, f"Task {number}: explain what {chance.choice(sorted(files))} is for.")


def sorted_first(messages: list[Message]) -> list[Message]:
    """All results in the system text, sorted, each once; the rest in order."""
    results = sorted({each["content"] for each in messages if each["role"] == "tool"})
    rest = [{**each, "content": "(see above)"} if each["role"] == "tool" else each for each in messages]
    return [{**SYSTEM, "content": "\n".join([SYSTEM["content"], *results])}, *rest[1:]]


class CacheReuse:
    """The runs of the last prompt that llama.cpp's server moves: each of at least `least` tokens, in their order."""

    def __init__(self, least: int = 256) -> None:
        self._least = least
        self._cached: list[int] = []

    def computed(self, prompt: list[int]) -> int:
        """Tokens of a prompt that are computed; it is the last one then."""
        cached, self._cached = self._cached, prompt
        reused = _num_equal(cached, 0, prompt, 0)
        place = reused
        while place < len(cached) and reused < len(prompt):
            count = _num_equal(cached, place, prompt, reused)
            is_moved = count >= self._least
            reused += count if is_moved else 0
            place += count if is_moved else 1
        return max(len(prompt) - reused, 1)


def _num_equal(one: list[int], first: int, other: list[int], second: int) -> int:
    count = 0
    while first + count < len(one) and second + count < len(other) and one[first + count] == other[second + count]:
        count += 1
    return count


def tiny(tokenizer: Any) -> LoadedModel:
    """A model that is fast and knows nothing: which tokens are computed does not depend on it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2**17, tie_word_embeddings=True, **sizes)
    return LoadedModel.from_module(LlamaForCausalLM(config), tokenizer)


def open_llm(model: Any, **options: Any) -> LLM:
    return LLM(
        model,
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size="1GiB", **options),
        engine_config=EngineConfig(request_cache_size="1GiB"),
        self_check=False,
    )


def count(options: argparse.Namespace) -> None:
    """Counts the tokens that are computed, by policy and kind of cache."""
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
    files = {name: text for name, text in files.items() if len(text) > 2_000}
    workloads: dict[str, Callable[[int], Iterator[Any]]] = {
        name: lambda seed, compact=compact: session(files, compact, seed, options.steps)
        for name, compact in POLICIES.items()
    }
    workloads["sub-agents"] = lambda seed: sub_agents(files, seed, options.agents)
    kinds = {"agents": ("agents", False), "prefix caching": ("none", False), "sorted, prefix caching": ("none", True)}
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for workload, requests in workloads.items():
        for kind, (how, is_sorted) in kinds.items():
            computed = {True: 0, False: 0}
            total = {True: 0, False: 0}
            for seed in track(range(options.sessions), f"{workload}, {kind}"):
                with open_llm(tiny(tokenizer)) as llm:
                    for is_edited, messages in requests(seed):
                        (output,) = llm.chat(sorted_first(messages) if is_sorted else messages, ONE, find_documents=how)
                        computed[is_edited] += output.reuse.computed_tokens
                        total[is_edited] += output.reuse.num_tokens
            rows.setdefault(workload, {})[kind] = shares(computed, total)
        computed, total = {True: 0, False: 0}, {True: 0, False: 0}
        for seed in track(range(options.sessions), f"{workload}, {MOVED}"):
            slot = CacheReuse()
            for is_edited, messages in requests(seed):
                text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                prompt = tokenizer.encode(text, add_special_tokens=False)
                computed[is_edited] += slot.computed(prompt)
                total[is_edited] += len(prompt)
        rows[workload][MOVED] = shares(computed, total)
    save("agents", {"sessions": options.sessions, "steps": options.steps, "rows": rows})
    print(table(rows))
    (RESULTS / "agents.md").write_text(table(rows) + "\n", encoding="utf-8")
    draw(rows)


def shares(computed: dict[bool, int], total: dict[bool, int]) -> dict[str, float]:
    """Of tokens of requests after an edit (True) and of others."""
    return {
        "computed": sum(computed.values()) / sum(total.values()),
        "computed after an edit": computed[True] / max(total[True], 1),
        "tokens": sum(total.values()),
    }


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    kinds = list(next(iter(rows.values())))
    lines = [f"| tokens computed, all requests (after an edit) | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    for workload, row in rows.items():
        cells = (f"{row[kind]['computed']:.1%} ({row[kind]['computed after an edit']:.1%})" for kind in kinds)
        lines.append(f"| {workload} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    import matplotlib.pyplot as plt

    kinds = list(next(iter(rows.values())))
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for number, kind in enumerate(kinds):
        heights = [100 * row[kind]["computed after an edit"] for row in rows.values()]
        bars = axes.bar([place + 0.21 * number for place in range(len(rows))], heights, 0.19, label=kind)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks([place + 0.31 for place in range(len(rows))], list(rows))
    axes.set_ylabel("tokens computed after an edit, %")
    axes.legend(ncols=len(kinds), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.tight_layout()
    figure.savefig(RESULTS / "agents.png", dpi=120)


def measure(options: argparse.Namespace) -> None:
    """First token of the turn after the oldest result was dropped."""
    texts = [path.read_text()[:2_600] for path in sorted((ROOT / "src").rglob("*.py")) if path.stat().st_size > 3_000]
    seconds: dict[str, list[float]] = {"agents": [], "none": []}
    with LLM(options.time, chunk_cache_size="1GiB", request_cache_size="1GiB") as llm:
        for number in track(range(options.rounds), "rounds"):
            own = texts[9 * number : 9 * number + 9]
            turns = [
                (
                    {"role": "assistant", "content": f"I read file {place}."},
                    {"role": "tool", "tool_call_id": "c", "content": text},
                )
                for place, text in enumerate(own)
            ]
            for how, found in seconds.items():
                llm.chat(messages_of(turns, "What is it for?"), ONE, find_documents=how)
                begin, cpu = time.perf_counter(), time.process_time()
                (output,) = llm.chat(messages_of(turns[1:], "What is it for?"), ONE, find_documents=how)
                found.append(time.process_time() - cpu)
                said = f"{output.reuse.computed_tokens} of {output.reuse.num_tokens} computed"
                print(f"{how}: {found[-1]:.2f} s CPU, {time.perf_counter() - begin:.2f} s, {said}")
    medians = {how: statistics.median(found) for how, found in seconds.items()}
    ratio = medians["none"] / medians["agents"]
    print(f"first token after the oldest of nine turns was dropped: {ratio:.1f}x (prefix caching / agents)")
    report = {
        "model": Path(options.time).name,
        "threads": torch.get_num_threads(),
        "cpu_seconds": medians,
        "ratio": ratio,
    }
    save(f"agents-{options.name}", report)


WORDS = "amber cobalt ivory crimson jade onyx pearl russet sable teal umber violet".split()
DEFINED = re.compile(r"^def (\w+)\((\w[^()\n]*)\)", re.MULTILINE)
WAYS: dict[str, dict[str, Any]] = {
    "read in full": {"find_documents": "none"},
    "agents": {"find_documents": "agents"},
    "agents, nothing repaired": {"find_documents": "agents", "repair": "none"},
    "agents, names": {"find_documents": "agents", "repair": "names"},
}


def case(sources: dict[str, str], chance: Random) -> tuple[list[Turn], dict[str, list[tuple[str, str]]]]:
    """Results with planted constants, and questions about them with what a right answer holds."""
    names = chance.sample(sorted(sources), 6)
    words, asked = chance.sample(WORDS, 4), dict[str, list[tuple[str, str]]]()
    sizes = dict(zip(words, chance.sample(range(100, 999), 4), strict=True))
    turns = []
    for number, name in enumerate(names):
        limit, own = chance.randrange(100, 999), chance.randrange(100, 999)
        constant = f"MAX_{chance.choice(WORDS).upper()}_{name.rpartition('/')[2][:-3].upper()}"
        planted = [f"RETRY_LIMIT = {limit}", f"{constant} = {own}"]
        if number == 1:
            planted.append(f'DEFAULT_POOL = "{words[0]}"')
        if number == 4:
            planted.append(f"POOL_SIZES = {sizes}")
        text = sources[name][: sources[name].find("\n\n", 900)]
        lines, defined = text.splitlines(), DEFINED.search(text)
        places = [place for place, line in enumerate(lines) if not line.strip()] or [0]
        for line in planted:
            lines.insert(chance.choice(places), line)
        turns.append(
            (
                {"role": "assistant", "content": f"I read {name}."},
                {"role": "tool", "tool_call_id": f"c{number}", "content": f"# {name}\n" + "\n".join(lines)},
            )
        )
        asked.setdefault("one result", []).append(
            (f"What is the value of {constant}? Answer with the number.", str(own))
        )
        asked.setdefault("one of alike", []).append(
            (f"What is the value of RETRY_LIMIT in {name}? Answer with the number.", str(limit))
        )
        if defined:
            asked.setdefault("edit", []).append(
                (
                    f"In {name}, rename the function {defined[1]} to renamed. Write its new def line.",
                    f"def renamed({defined[2]})",
                )
            )
    asked["two results"] = [
        (f"How large is the pool that DEFAULT_POOL in {names[1]} names? Answer with the number.", str(sizes[words[0]]))
    ]
    return turns, asked


def answers(options: argparse.Namespace) -> None:
    """Counts right answers by kind of question, of results read apart and in full."""
    sources = {
        str(path.relative_to(ROOT / "src" / "kvmosaic")): path.read_text() for path in (ROOT / "src").rglob("*.py")
    }
    sources = {name: text for name, text in sources.items() if len(text) > 4_000}
    right: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    totals, same = Counter[str](), Counter[str]()
    with LLM(options.answers, chunk_cache_size="1GiB", request_cache_size="1GiB") as llm:
        for seed in track(range(options.sessions), "histories"):
            turns, asked = case(sources, Random(seed))
            for kind, questions in asked.items():
                for question, expected in questions:
                    totals[kind] += 1
                    first = ""
                    for way, how in WAYS.items():
                        params = SamplingParams(temperature=0, max_tokens=48, stop=["\n\n"], repair=how.get("repair"))
                        (output,) = llm.chat(
                            [*messages_of(turns, "Read the files."), {"role": "user", "content": question}],
                            params,
                            find_documents=how["find_documents"],
                        )
                        text = output.outputs[0].text
                        first = first or text
                        right[way][kind] += expected in text
                        same[way] += text == first
            print(dict(totals), {way: sum(found.values()) for way, found in right.items()}, flush=True)
    lines = [
        f"| {Path(options.answers).name} | {' | '.join(totals)} | same answer |",
        "|---|" + "---|" * (len(totals) + 1),
    ]
    for way, found in right.items():
        cells = [f"{found[kind]} of {count}" for kind, count in totals.items()]
        lines.append(f"| {way} | {' | '.join(cells)} | {same[way] / totals.total():.0%} |")
    print("\n".join(lines))
    save(f"agents-answers-{options.name}", {"questions": totals, "right": right, "same": same})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", metavar="MODEL", help="measure the first token of this model instead")
    parser.add_argument("--answers", metavar="MODEL", help="count right answers of this model instead")
    parser.add_argument("--name", default="first-token", help="of the result")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", default=str(ROOT / ".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--agents", type=int, default=12)
    options = parser.parse_args()
    run = answers if options.answers else measure if options.time else count
    run(options)


if __name__ == "__main__":
    main()
