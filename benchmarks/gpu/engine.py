"""Our engine on random models of two sizes, beside transformers with its own attention and cache."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.engines import dense_logits
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.report import LAUNCHED
from benchmarks.gpu.stage import Stage
from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, RequestOutput, SamplingParams
from kvmosaic.attention import BackendName
from kvmosaic.engine.self_check.whole import run_self_check
from kvmosaic.lab.bench.models import RANDOM_MODELS
from kvmosaic.lab.bench.sizes import Sizes
from kvmosaic.lab.bench.workloads import TokenSource
from kvmosaic.model import LoadedModel

GIB = 2**30
EIGHT = {
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
"""The shape of Llama 3.1 8B."""
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1_024,
}
MAX_DECODED = 512
"""Tokens of each document where many requests decode, so that private ones fit beside 8 B weights."""
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """Documents of a prompt, how many requests decode at once, and tokens that they decode."""

    documents: int
    document_tokens: int
    readers: int
    answer: int

    @property
    def sizes(self) -> Sizes:
        """For the sources of tokens."""
        return Sizes(documents=self.documents, document_tokens=self.document_tokens)


def measure(stage: Stage) -> None:
    """The small model first: whether it is right; then how fast both are."""
    small = TINY if stage.is_dry else RANDOM_MODELS["random-0.5b"]
    shape = Shape(3, 24, 3, 4) if stage.is_dry else Shape(8, 512, 32, 33)
    for dtype in (torch.float32, torch.bfloat16):
        with stage.part("self-check", model="0.5b", dtype=str(dtype)) as row:
            loaded = loaded_model(stage, small, dtype)
            found = run_self_check(loaded)
            row |= {"passed": found.passed, "reason": found.reason}
        if dtype is torch.float32:
            with stage.part("greedy tokens", model="0.5b", dtype="float32") as row:
                row |= compare_with_dense(stage, loaded, shape)
    del loaded
    rates(stage, "0.5b", small, shape)
    if stage.is_dry or torch.cuda.get_device_properties(0).total_memory > 40 * GIB:
        rates(
            stage, "8b", TINY if stage.is_dry else EIGHT, replace(shape, document_tokens=32 if stage.is_dry else 2_048)
        )


def module_of(stage: Stage, config: dict[str, Any], dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama with random weights, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with stage.device:
            module = LlamaForCausalLM(LlamaConfig(**config, bos_token_id=None, eos_token_id=None))
    finally:
        torch.set_default_dtype(before)
    return module.eval()


def loaded_model(stage: Stage, config: dict[str, Any], dtype: torch.dtype) -> LoadedModel:
    """Ready for the engine; its identity is a name, as hashing the weights takes longer than measuring."""
    return LoadedModel.from_module(module_of(stage, config, dtype), fingerprint=f"random {config} {dtype}")


def llm_of(loaded: LoadedModel, room: int, backend: BackendName | None = None) -> LLM:
    """An engine with so many bytes for documents, and as many for requests."""
    return LLM(
        loaded,
        attention_backend=backend,
        self_check=False,
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size=room, position_strategy="sequential", repair="none"),
        engine_config=EngineConfig(request_cache_size=room, max_num_batched_tokens=8_192, max_num_seqs=64),
    )


def compare_with_dense(stage: Stage, loaded: LoadedModel, shape: Shape) -> dict[str, Any]:
    """Tokens of composed prompts, and the choices of one dense forward over prompt and answer."""
    source = TokenSource(0, "dense", loaded.module.config.vocab_size, shape.sizes)
    documents = source.documents()
    same = total = 0
    margins = []
    # the kernels are slow where they are interpreted, and this is where they have to be right
    count, backend = (2, "triton") if stage.is_dry else (16, None)
    with llm_of(loaded, GIB, backend) as llm:
        for order in (documents, documents[::-1]):
            prompt = Prompt.from_tokens(source.system(), order, source.question())
            request = llm.engine.add_request(prompt, replace(GREEDY, max_tokens=count))
            llm.engine.run([request])
            if request.error is not None:
                raise request.error
            chosen = list(request.output().outputs[0].token_ids)
            logits = dense_logits(loaded, request.layout, chosen)
            best = logits.topk(2)
            same += sum(int(one == two) for one, two in zip(chosen, best.indices[:, 0].tolist(), strict=True))
            total += len(chosen)
            margins += (best.values[:, 0] - best.values[:, 1]).tolist()
    return {"same": same, "of": total, "smallest_margin": min(margins), "backend": llm.attention.name}


def rates(stage: Stage, name: str, config: dict[str, Any], shape: Shape) -> None:
    """First token and decode, by transformers and by us, of the same weights."""
    about = {"model": name, "dtype": "bfloat16", "documents": f"{shape.documents} x {shape.document_tokens}"}
    module = module_of(stage, config, torch.bfloat16)
    source = TokenSource(0, name, config["vocab_size"], shape.sizes)
    system, documents, question = source.system(), source.documents(), source.question()
    ids = [*system, *(token for document in documents for token in document), *question]
    with stage.part("transformers", **about) as row, torch.inference_mode():
        module.set_attn_implementation("sdpa")
        row |= by_transformers(stage, module, torch.tensor([ids], device=stage.device))
    loaded = LoadedModel.from_module(module, fingerprint=f"random {config}")
    heads = config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 2 * heads * config["num_hidden_layers"]
    private = shape.readers * (shape.documents * MAX_DECODED + 128) * token_bytes
    room = GIB // 16 if stage.is_dry else GIB + max(4 * len(ids) * token_bytes, private)
    with stage.part("model", **about) as row:
        weights = sum(weight.numel() * weight.element_size() for weight in module.parameters())
        row |= {"weight_bytes": weights, "kv_bytes_per_token": token_bytes, "prompt_tokens": len(ids)}
    llm = llm_of(loaded, room)
    with stage.part("first token", **about) as row:
        row["backend"] = str(llm.attention)
        row |= first_tokens(stage, llm, source, shape)
    for kind in ("one", "private", "shared"):
        with stage.part("decode", kind=kind, **about) as row:
            row |= decoding(stage, llm, source, shape, kind)
        graphs, llm.engine.runner.graphs = llm.engine.runner.graphs, None
        with stage.part(LAUNCHED, kind=kind, **about) as row:
            row |= decoding(stage, llm, source, replace(shape, answer=shape.answer // 2 + 1), kind)
        llm.engine.runner.graphs = graphs
    with stage.part("step", **about) as row:
        row |= profiled(stage, llm, source, shape)
    if stage.device.type == "cuda":
        with stage.part("memory", **about) as row:
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
    llm.close()
    del llm, loaded, module
    stage.free()


def by_transformers(stage: Stage, module: LlamaForCausalLM, ids: Tensor) -> dict[str, float]:
    """Reads the whole prompt with sdpa, then decodes."""

    def prefill() -> DynamicCache:
        cache = DynamicCache(config=module.config)
        module(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    found = {"prefill_seconds": stage.seconds(prefill, repeats=3, warm=1)}
    cache = prefill()
    token = ids[:, -1:]

    def decode() -> None:
        module(input_ids=token, past_key_values=cache, use_cache=True)

    return {**found, "decode_seconds": stage.seconds(decode, repeats=5, warm=2)}


def asked(stage: Stage, llm: LLM, prompts: Sequence[Prompt], count: int) -> tuple[float, float, RequestOutput]:
    """Seconds until the last prompt has its first token, and per step after that; and the last output."""
    outputs: list[RequestOutput] = []
    seconds = stage.wall_seconds(lambda: outputs.extend(llm.generate(prompts, replace(GREEDY, max_tokens=count))))
    first = max(output.metrics.first_token_time - output.metrics.arrival_time for output in outputs)
    return first, (seconds - first) / max(1, count - 1), outputs[-1]


def first_tokens(stage: Stage, llm: LLM, source: TokenSource, shape: Shape) -> dict[str, Any]:
    """Cold, in the same order, and permuted: medians of a few prompts, each with its own question.

    Those of the first two rounds are left out: a step is captured the second time that its shape occurs.
    """
    found: dict[str, list[float]] = {"cold": [], "warm": [], "permuted": []}
    reused: list[float] = []
    system = source.system()
    for number in range(1 if stage.is_dry else 5):
        documents = source.documents()
        orders = {"cold": documents, "warm": documents, "permuted": source.shuffled(documents)}
        for name, order in orders.items():
            prompt = Prompt.from_tokens(system, order, source.question())
            seconds, _, output = asked(stage, llm, [prompt], 1)
            if stage.is_dry or number > 1:
                found[name].append(seconds)
        reused.append(output.reuse.reused_tokens / output.reuse.num_tokens)
    return {
        **{f"{name}_seconds": statistics.median(times) for name, times in found.items()},
        "reused_share": statistics.median(reused),
    }


def decoding(stage: Stage, llm: LLM, source: TokenSource, shape: Shape, kind: str) -> dict[str, float]:
    """One request; many over the same documents, each in an order of its own; as many over documents of their own."""
    system, shared = source.system(), source.documents()
    count = 1 if kind == "one" else shape.readers
    prompts = []
    for _ in range(count):
        documents = source.documents() if kind == "private" else source.shuffled(shared)
        documents = [document[:MAX_DECODED] for document in documents]
        prompts.append(Prompt.from_tokens(system, documents, source.question()))
    graphs = llm.engine.runner.graphs
    for _ in range(1 if graphs is None else 3):  # the second time, steps of the same shape are captured
        asked(stage, llm, prompts, 1 if graphs is None else shape.answer)
    before = 0 if graphs is None else graphs.replays.num_replays
    _, per_step, _ = asked(stage, llm, prompts, shape.answer)
    tokens = sum(chunk.num_tokens for chunk in prompts[0].chunks)
    found = {"requests": count, "seconds_per_step": per_step, "document_tokens_of_each": tokens}
    if graphs is not None:
        found |= {
            "replayed": graphs.replays.num_replays - before,
            "of": shape.answer - 1,
            "problem": graphs.replays.problem,
        }
    return found


def profiled(stage: Stage, llm: LLM, source: TokenSource, shape: Shape) -> dict[str, Any]:
    """How much of decode steps the device works: the rest waits for the host."""
    documents = source.documents()
    system, question = source.system(), source.question()
    prompts = [Prompt.from_tokens(system, source.shuffled(documents), question) for _ in range(shape.readers)]
    requests = [llm.engine.add_request(prompt, replace(GREEDY, max_tokens=16)) for prompt in prompts]
    while not all(request.first_token_time for request in requests):
        llm.engine.step()
    for _ in range(4):  # captured by then
        llm.engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if stage.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    seconds = stage.wall_seconds(lambda: [llm.engine.step() for _ in range(3)])
    with torch.profiler.profile(activities=activities) as profile:
        stage.wall_seconds(lambda: [llm.engine.step() for _ in range(3)])
    llm.engine.run(requests)
    # kernels alone: operators have the time of their kernels once more
    events = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    on_device = sum(event.self_device_time_total for event in events) / 1e6
    longest = sorted(events, key=lambda event: -event.self_device_time_total)[:8]
    return {
        "seconds_per_step": seconds / 3,
        "device_seconds_per_step": on_device / 3,
        "device_share": on_device / seconds,
        "longest": [[event.key[:80], event.count, event.self_device_time_total / 3e6] for event in longest],
    }
