"""What codecs of stored chunks cost: bytes, time, errors, and right answers of the bundled reader.

    PYTHONPATH=. python benchmarks/codec.py [--questions 1000] [--rounds 5]

Questions about held-out names (`kvmosaic.lab.eval.text`), 3 to 6 documents each, go to the bundled reader through
`LLM`. Its documents are warmed; their chunks are read from the pool, encoded, decoded, written back; then the
questions are asked, all of them for every codec. An answer counts if it is exactly the right one.

- Bytes and times: the chunks of the reader, all entries joined to chunks of 512 tokens, checksum included, one thread,
  CPU time, medians; MB are of the bfloat16 tensors, whatever is stored.
- Errors: the largest by the largest number, the mean by the mean size; of keys, of values, and of attention over one
  chunk, whose 64 queries per head are mixtures of two of its keys, in float32.

Writes results/codec.json and codec.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from facts import RESULTS, save
from torch import Tensor

from kvmosaic import LLM, SamplingParams
from kvmosaic.cache import Chunk
from kvmosaic.cache.keys import Key, encode_tokens
from kvmosaic.entries import CodecName, EntryExpectation, EntryHeader, decode_entry, encode_entry
from kvmosaic.lab.eval.text.documents import Example, Recipe, TextSource
from kvmosaic.layers import geometry_of
from kvmosaic.memory import ChunkTensors
from training.measure import Score

CODECS: tuple[CodecName, ...] = ("none", "int8")
TOKENS = 512


@dataclass(frozen=True)
class Speed:
    """Of entries of long chunks."""

    bytes_per_token: float
    ratio: float
    encode_mb_s: float
    decode_mb_s: float


def header_of(llm: LLM, chunk: Chunk, codec: CodecName) -> EntryHeader:
    """The header of a chunk's entry."""
    layers, name = geometry_of(llm.model.layers), str(llm.model.dtype).removeprefix("torch.")
    return EntryHeader(llm.model.fingerprint, chunk.key, chunk.root, chunk.start, chunk.tokens, layers, name, codec)


def long_header(llm: LLM, codec: CodecName) -> EntryHeader:
    """The header of a chunk of `TOKENS`."""
    layers, tokens = geometry_of(llm.model.layers), encode_tokens(range(TOKENS))
    return EntryHeader(llm.model.fingerprint, Key(b"k" * 32), Key(b"r" * 32), 0, tokens, layers, "bfloat16", codec)


def expected(header: EntryHeader) -> EntryExpectation:
    """What reads an entry of this header."""
    names = ("fingerprint", "key", "root", "start", "tokens", "layers", "dtype", "codec")
    return EntryExpectation(**{name: getattr(header, name) for name in names})


def accuracy(llm: LLM, examples: list[Example], codec: CodecName) -> tuple[Score, list[ChunkTensors]]:
    """Asks all questions over documents that went through the codec once; also gives some chunks before that."""
    score, kept = Score(), []
    storage = llm.engine.runner.storages["chunk_cache"]
    for example in examples:
        documents = [{"title": document.title or "", "text": document.text} for document in example.documents]
        llm.warm(documents, system=example.system)
        done = []
        for chunk in llm.engine.kv_cache.chunks():
            layers = storage.read_chunk(chunk.block_ids, chunk.num_tokens)
            kept.append(layers)
            header = header_of(llm, chunk, codec)
            entry = decode_entry(encode_entry(header, layers), expected(header))
            storage.write_chunk(chunk.block_ids, entry.layers)
            done.append(chunk)
        system = [{"role": "system", "content": example.system}] if example.system else []
        conversations = [[*system, {"role": "user", "content": question.text}] for question in example.questions]
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=16), documents=documents)
        assert set(llm.engine.kv_cache.chunks()) == set(done), "nothing was computed again"
        for question, output in zip(example.questions, outputs, strict=True):
            score.asked += 1
            said = output.outputs[0].text.strip()
            if said == question.answer.strip():
                score.right += 1
            else:
                score.wrong.append(f"{question.text} expected {question.answer!r}, got {said!r}")
        llm.engine.kv_cache.reset()
    return score, kept


def long_chunks(chunks: list[ChunkTensors]) -> list[ChunkTensors]:
    """The same tokens as chunks of `TOKENS`."""
    joined = [
        tuple(torch.cat([chunk[layer][part] for chunk in chunks]) for part in (0, 1)) for layer in range(len(chunks[0]))
    ]
    count = len(joined[0][0]) // TOKENS
    return [
        [tuple(tensor[number * TOKENS : (number + 1) * TOKENS].contiguous() for tensor in pair) for pair in joined]
        for number in range(count)
    ]


def errors(chunks: list[ChunkTensors], decoded: list[ChunkTensors]) -> dict[str, float]:
    """Largest and mean errors, relative to the largest number and to the mean size."""
    found: dict[str, list[float]] = {}
    for before, after in zip(chunks, decoded, strict=True):
        for (key, value), (new_key, new_value) in zip(before, after, strict=True):
            outputs = attention(key, key, value), attention(key, new_key, new_value)
            pairs = {"key": (key, new_key), "value": (value, new_value), "attention": outputs}
            for name, (one, two) in pairs.items():
                gap = (one.float() - two.float()).abs()
                found.setdefault(f"{name}_max", []).append((gap.max() / one.float().abs().max()).item())
                found.setdefault(f"{name}_mean", []).append((gap.mean() / one.float().abs().mean()).item())
    return {name: (max if name.endswith("max") else statistics.fmean)(values) for name, values in found.items()}


def attention(like: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[64, G, Dv]: attention of 64 queries made of the keys `like` [n, G, D]."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(0, len(like), (2, 64), generator=generator)
    query = like[picked[0]].float() + 0.5 * like[picked[1]].float()
    scale = 4.0 / like.float().pow(2).sum(-1).mean()
    weights = torch.softmax(torch.einsum("qgd,ngd->gqn", query, key.float()) * scale, -1)
    return torch.einsum("gqn,ngd->qgd", weights, value.float())


def speed(llm: LLM, chunks: list[ChunkTensors], codec: CodecName, rounds: int) -> Speed:
    """Bytes and times of entries of these chunks."""
    header = long_header(llm, codec)
    raw = sum(tensor.nbytes for chunk in chunks for pair in chunk for tensor in pair if tensor is not None)
    entries = [encode_entry(header, chunk) for chunk in chunks]
    encoding = [seconds(lambda: [encode_entry(header, chunk) for chunk in chunks]) for _ in range(rounds)]
    decoding = [seconds(lambda: [decode_entry(entry, expected(header)) for entry in entries]) for _ in range(rounds)]
    size = sum(len(entry) for entry in entries)
    return Speed(
        size / len(chunks) / TOKENS,
        raw / size,
        raw / 1e6 / statistics.median(encoding),
        raw / 1e6 / statistics.median(decoding),
    )


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this thread."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| codec | bytes per token | smaller by | right answers | error K max / mean | V | attention | "
        "encode MB/s | decode MB/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gaps = [f"{row[f'{name}_max']:.2%} / {row[f'{name}_mean']:.2%}" for name in ("key", "value", "attention")]
        cells = [
            row["codec"],
            f"{row['bytes_per_token']:.0f}",
            f"{row['ratio']:.2f}x",
            f"{row['accuracy']:.2%}",
            *gaps,
            f"{row['encode_mb_s']:.0f}",
            f"{row['decode_mb_s']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures all codecs, prints a table and saves the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source, examples = TextSource(7, "held_out"), []
    while sum(len(example.questions) for example in examples) < arguments.questions:
        examples.append(source.example(Recipe(documents=(3, 6))))
    llm = LLM(dtype="bfloat16")
    rows, chunks = [], []
    for codec in CODECS:
        score, kept = accuracy(llm, examples, codec)
        print(codec, f"{score.accuracy:.4f}", score.wrong[:3], flush=True)
        chunks = chunks or long_chunks(kept)[:16]
        header = long_header(llm, codec)
        decoded = [decode_entry(encode_entry(header, chunk), expected(header)).layers for chunk in chunks]
        measured = speed(llm, chunks, codec, arguments.rounds)
        rows.append(
            {"codec": codec, "accuracy": score.accuracy, "right": score.right}
            | {"questions": score.asked}
            | {name: round(getattr(measured, name), 3) for name in Speed.__annotations__}
            | {name: round(value, 6) for name, value in errors(chunks, decoded).items()}
        )
    report = {"torch": torch.__version__, "tokens_per_chunk": TOKENS, "chunks": len(chunks), "results": rows}
    save("codec", report)
    (RESULTS / "codec.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
