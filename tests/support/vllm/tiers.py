"""What tests do with the tiers of an engine, inside its fork."""

from __future__ import annotations

import threading
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvmosaic.config import TierConfig
from kvmosaic.tiers import Deadline
from kvmosaic.vllm.operations import Load, Operations, RunFetch, Store, StoredRun
from kvmosaic.vllm.worker.kv_layout import KVLayout
from kvmosaic.vllm.worker.tier_side import Share, WorkerTiers
from support.vllm import inside


def worker_tiers() -> Any:
    return get_kv_transfer_group()._tiers


def tiering(engine: Any) -> Any:
    return engine.scheduler.connector._composer.tiering


def settle(engine: Any) -> dict[str, Any]:
    """Steps until nothing is left to do and everything is written; what the tiers did so far, and what is left."""
    state = inside.settle(engine)
    tiered_store = worker_tiers().tiered_store
    assert tiered_store.flush(60)
    tiering(engine).check_invariants()
    stats = {name: getattr(tiered_store.stats, name) for name in tiered_store.stats.__dataclass_fields__}
    leaked = state["num_blocks"] - 1 - state["free"] + len(state["requests"])
    entries = {stat.name: stat.num_entries for stat in tiered_store.tier_stats()}
    return {"stats": stats, "entries": entries, "leaked": leaked, "staged": len(worker_tiers())}


def forget(engine: Any, tiers: list[str], connector: bool = False) -> None:
    """vLLM forgets its prefix cache, and these tiers all that they have."""
    settle(engine)
    assert engine.llm.reset_prefix_cache(reset_connector=connector)
    for tier in worker_tiers().tiered_store.tiers:
        if tier.name in tiers:
            behind = getattr(tier, "tier", tier)
            if tier.name == "redis":
                behind._run(Deadline(10), lambda session: session.ask(("FLUSHDB",)))
            else:
                index = behind._store._index if tier.name == "disk" else behind._index
                tier.delete_many(list(index), Deadline(10))


def answer(engine: Any, asks: list[dict[str, Any]]) -> dict[str, Any]:
    """Answers, and how many tokens were computed for them altogether, those of the first answer tokens included."""
    computed: list[int] = []
    schedule = engine.scheduler.schedule

    def counted(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        computed.append(output.total_num_scheduled_tokens)
        return output

    engine.scheduler.schedule = counted
    try:
        answers = inside.answer(engine, asks)
    finally:
        engine.scheduler.schedule = schedule
    return {"answers": answers, "computed": sum(computed)}


def change_weights(engine: Any, factor: float) -> None:
    """Multiplies one weight in all layers."""
    for name, parameter in worker_tiers()._places.root.named_parameters():
        if name.endswith("input_layernorm.weight"):
            parameter.data.mul_(factor)


def play_while_hanging(engine: Any, asks: list[dict[str, Any]], plain: int) -> list[Any]:
    """All at once, while no tier answers until number `plain` has: which ones ended before that, and the answers."""
    goes_on = threading.Event()
    for tier in worker_tiers().tiered_store.tiers:
        get = tier.get_many

        def hanging(keys: Any, deadline: Any, get: Any = get, **more: Any) -> Any:
            assert goes_on.wait(60)
            return get(keys, deadline, **more)

        tier.get_many = hanging
    ended: dict[int, Any] = {}
    early: list[int] = []
    for index, ask in enumerate(asks):
        engine.engine.add_request(f"hanging-{index}", *inside.prompt_and_params(ask))
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            if output.finished:
                index = int(output.request_id.split("-")[1])
                ended[index] = inside._said(output)
                if not goes_on.is_set():
                    early.append(index)
                if index == plain:
                    goes_on.set()
    for tier in worker_tiers().tiered_store.tiers:
        del tier.get_many
    return [early, [ended[index] for index in range(len(asks))]]


def stored_and_loaded(engine: Any) -> list[bool]:
    """Whether a run is found, comes back in other blocks as it was, and is dropped; and another one is not found."""
    worker = engine.core.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context
    caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    places = KVLayout.of(worker.vllm_config, caches)
    size = places.block_size
    run = StoredRun("model", bytes(32), bytes(range(32)), 5, bytes(4 * (size + 3)))
    source, target = (1, 2), (3, 4)
    torch.manual_seed(0)
    slots = places.slots(source, 5, run.num_tokens)
    for place in places.layers:
        keys, values = place.layout.read(slots)
        place.layout.write(slots, torch.randn_like(keys), None if values is None else torch.randn_like(values))

    def fetched(number: int, run: StoredRun) -> str:
        tiers.run(Operations(fetches=[RunFetch(number, run, None)]))
        while not (reports := tiers.told()):
            tiers.tiered_store.wait(1.0)
        (report,) = reports
        return str(report.tier)

    tiers = WorkerTiers(
        places, Share(0, 1, 1, 2), TierConfig(("host:64MiB",), chunk_loading="always"), 0, lambda: "weights"
    )
    tiers.save([Store(run, source, 0.1)])
    assert tiers.tiered_store.flush(60)
    found = fetched(1, run)
    tiers.run(Operations(loads=[Load(1, 2, target, 7, run.num_tokens - 2)], drops=[1]))
    same = True
    moved = places.slots(target, 7, run.num_tokens - 2)
    for place in places.layers:
        before, after = place.layout.read(slots[2:]), place.layout.read(moved)
        for one, other in zip(before, after, strict=True):
            same &= one is other is None or torch.equal(one, other)
    is_empty = not len(tiers)
    other = StoredRun("model", bytes([1] * 32), run.root, 5, run.tokens)
    missed = fetched(2, other)
    tiers.close()
    return [found == "host", same, is_empty, missed == ""]
