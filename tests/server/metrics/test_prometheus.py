from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.cpu_time import least_cpu_seconds
from support.server import RunningServer, wait_until
from support.tiers import TroubledTier

from kvmosaic.engine import Engine, RequestDelta
from kvmosaic.errors import TierUnavailable
from kvmosaic.metrics import catalogue
from kvmosaic.sampling import ReuseReport
from kvmosaic.sampling.reuse import RepairUse
from kvmosaic.server.metrics.gauges import MAX_TENANTS, OTHERS

Sample = tuple[str, frozenset[tuple[str, str]]]
CHAT = "/v1/chat/completions"
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


@pytest.fixture(scope="module")
def tiered() -> Iterator[RunningServer]:
    with RunningServer(chunk_tier=["host:64MiB", "host:32MiB"], chunk_loading="always") as running:
        yield running


def documents(*names: str) -> list[dict[str, str]]:
    return [{"id": name, "text": f"{name} was built by the harbour in the year of the great storm."} for name in names]


def ask(server: RunningServer, path: str = CHAT, **body: Any) -> dict[str, Any]:
    body = {"model": server.model, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
    body.setdefault("messages", [{"role": "user", "content": "When was it built?"}])
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


class Look:
    """What /metrics says."""

    def __init__(self, server: RunningServer) -> None:
        families = parse_text(httpx.get(server.url + "/metrics").text)
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        asked = set(labels.items())
        return sum(value for (found, has), value in self.samples.items() if found == name and asked <= has)


def difference(server: RunningServer, action: Any) -> Any:
    """What an action adds to a metric, by name and labels."""
    before = Look(server)
    action()
    after = Look(server)
    return lambda name, **labels: round(after(name, **labels) - before(name, **labels), 9)


def test_every_family_of_the_catalogue_is_exported_with_its_labels(tiered: RunningServer) -> None:
    ask(tiered)
    found: dict[str, set[str]] = {}
    for name, labels in Look(tiered).samples:
        found.setdefault(name, set()).update({label for label, _ in labels} - {"le"})
    # without keys there is no tenant with a quota
    expected = {name: set(family.labels) for family in catalogue() for name in family.series}
    expected.pop("kvmosaic:tenant_quota_bytes")
    expected.pop("kvmosaic:tier_load_bytes_per_second")  # nothing was loaded yet
    assert {name: labels for name, labels in found.items() if not name.startswith("process_")} == expected


def test_without_tiers_there_are_no_series_of_them(server: RunningServer) -> None:
    assert [name for name, _ in Look(server).samples if name.startswith("kvmosaic:tier_")] == []


def test_what_leaves_the_device_is_counted_in_the_tiers_and_so_is_what_comes_back(tiered: RunningServer) -> None:
    four = [
        {"id": f"d{n}", "text": f"Ferry {n} was built by the harbour in the year of the great storm. " * 40}
        for n in range(4)
    ]
    cold = {"min_accesses": 2**20, "idle_seconds": 0}

    def leave() -> None:
        ask(tiered, documents=four)
        assert httpx.post(tiered.url + "/v1/documents:sleep", json=cold).json()["num_chunks"] >= 4
        assert tiered.llm.engine.offloader is not None and tiered.llm.engine.offloader.tiered_store.flush(10)

    left = difference(tiered, leave)
    back = difference(tiered, lambda: ask(tiered, documents=four))
    assert left("kvmosaic:tier_stores_total", outcome="stored") >= 4
    for tier in ("host", "host-2"):
        assert left("kvmosaic:tier_puts_total", tier=tier) >= 4 and left("kvmosaic:tier_entries", tier=tier) >= 4
        assert left("kvmosaic:tier_bytes", tier=tier) == left("kvmosaic:tier_written_bytes_total", tier=tier) > 0
    assert back("kvmosaic:tier_hits_total", tier="host") == back("kvmosaic:tier_fetches_total", outcome="fetched") > 0
    assert back("kvmosaic:chunk_loads_total") == back("kvmosaic:tier_hits_total")
    assert back("kvmosaic:chunk_loaded_tokens_total") > 100 and back("kvmosaic:tier_read_bytes_total") > 0
    look = Look(tiered)
    assert look("kvmosaic:tier_up", tier="host") == look("kvmosaic:tier_up", tier="host-2") == 1
    assert look("kvmosaic:tier_quota_bytes", tier="host-2") == 2**25
    assert look("kvmosaic:tier_load_bytes_per_second", tier="host") > 0


def test_a_tier_that_fails_is_down_until_it_answers() -> None:
    troubled = TroubledTier("redis")
    with RunningServer(tiers=[troubled]) as server:
        offloader = server.llm.engine.offloader
        assert offloader is not None and Look(server)("kvmosaic:tier_up", tier="redis") == 1
        troubled.error = TierUnavailable("gone")
        for name in ("Velmouth", "Cormere"):
            ask(server, documents=documents(name))
            assert offloader.tiered_store.flush(10)
        down = Look(server)
        assert down("kvmosaic:tier_up", tier="redis") == 0
        assert down("kvmosaic:tier_breaker_openings_total", tier="redis") == 1
        assert down("kvmosaic:tier_breaker_skips_total", tier="redis") >= 1
        assert down("kvmosaic:tier_stores_total", outcome="failed") == 2
        troubled.error = None
        wait_until(lambda: Look(server)("kvmosaic:tier_up", tier="redis") == 1)


def test_sleep_is_a_gauge(tiered: RunningServer) -> None:
    assert Look(tiered)("kvmosaic:engine_asleep") == 0
    httpx.post(tiered.url + "/sleep")
    assert Look(tiered)("kvmosaic:engine_asleep") == 1
    httpx.post(tiered.url + "/wake_up")
    assert Look(tiered)("kvmosaic:engine_asleep") == 0


@pytest.mark.parametrize("accept", [{}, OPENMETRICS], ids=["text", "openmetrics"])
def test_both_formats_are_read_by_their_own_parsers(server: RunningServer, accept: dict[str, str]) -> None:
    reply = httpx.get(server.url + "/metrics", headers=accept)
    kind = "application/openmetrics-text; version=1.0.0" if accept else "text/plain; version=0.0.4"
    assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
    families = {family.name: family for family in (parse_openmetrics if accept else parse_text)(reply.text)}
    assert families["kvmosaic:chunk_lookups"].type == "counter"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert families["kvmosaic:chunk_allocate_seconds"].type == "summary"


def test_a_document_is_computed_once_and_then_found(server: RunningServer) -> None:
    twice = documents("Corlow", "Fenbury")
    first = difference(server, lambda: ask(server, documents=twice))
    again = difference(server, lambda: ask(server, documents=twice[::-1]))
    for added, num_found in ((first, 0), (again, 2)):
        assert added("kvmosaic:chunk_lookups_total") == 2
        assert added("kvmosaic:chunk_hits_total") == num_found
        assert added("kvmosaic:chunk_misses_total") == 2 - num_found
        assert added("kvmosaic:chunk_compute_seconds_count") == 2 - num_found
        assert added("kvmosaic:chunk_allocate_seconds_count") == 1
        assert added("kvmosaic:chunk_lookup_seconds_count") == 2
    assert first("kvmosaic:chunk_entries") == 2
    assert first("kvmosaic:chunk_tokens_total", action="computed") > 0
    assert again("kvmosaic:chunk_tokens_total", action="reused") == first("kvmosaic:chunk_tokens_total")
    assert first("kvmosaic:chunk_compute_seconds_sum") > 0


def test_documents_seen_at_another_position_count_as_moved(server: RunningServer) -> None:
    body = {"documents": documents("Velham", "Osviby"), "position_strategy": "sequential"}
    ask(server, **body)
    added = difference(server, lambda: ask(server, **{**body, "documents": body["documents"][::-1]}))
    assert added("kvmosaic:chunk_tokens_total", action="moved") > 0
    assert added("kvmosaic:prompt_tokens_total", action="moved") == added("kvmosaic:chunk_tokens_total", action="moved")
    assert added("kvmosaic:chunk_tokens_total", action="computed") == 0


def test_tokens_agree_with_what_the_reply_says(server: RunningServer) -> None:
    replies: list[dict[str, Any]] = []
    added = difference(server, lambda: replies.append(ask(server, documents=documents("Lumdale"), n=2)))
    usage = replies[0]["usage"]
    details = usage["prompt_tokens_details"]
    assert added("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert added("vllm:generation_tokens_total") == usage["completion_tokens"] == 8
    assert added("kvmosaic:prompt_tokens_total") == usage["prompt_tokens"]
    assert added("kvmosaic:prompt_tokens_total", action="computed") == details["recomputed_tokens"]
    assert added("vllm:request_prompt_tokens_sum") == usage["prompt_tokens"]
    assert added("vllm:request_generation_tokens_sum") == usage["completion_tokens"]
    assert added("vllm:request_prefill_kv_computed_tokens_sum") == details["recomputed_tokens"]
    assert added("vllm:request_params_n_sum") == 2
    assert added("vllm:request_success_total", finished_reason="length") == 2
    assert added("vllm:request_success_total") == 2
    assert added("kvmosaic:requests_total", route=CHAT, status="complete") == 1


def test_times_of_a_request_are_observed_once_and_add_up(server: RunningServer) -> None:
    ask(server, documents=documents(*(f"Tower {number}" for number in range(8))))  # what a token takes is known then
    added = difference(server, lambda: ask(server))
    times = ("request_queue_time", "request_prefill_time", "request_decode_time")
    for name in (*times, "e2e_request_latency", "time_to_first_token", "request_inference_time"):
        assert added(f"vllm:{name}_seconds_count") == 1
        assert added(f"vllm:{name}_seconds_bucket", le="+Inf") == 1
    whole = added("vllm:e2e_request_latency_seconds_sum")
    assert sum(added(f"vllm:{name}_seconds_sum") for name in times) == pytest.approx(whole, abs=1e-6)
    assert 0 < added("vllm:time_to_first_token_seconds_sum") < whole
    assert added("vllm:inter_token_latency_seconds_count") <= 3
    assert added("kvmosaic:request_uncached_ttft_seconds_count") == 1


def test_prefix_hits_are_counted_in_tokens_and_apart_from_documents(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Tell me about the lighthouse. " * 8}]
    ask(server, messages=messages)
    added = difference(server, lambda: ask(server, messages=messages))
    assert 0 < added("vllm:prefix_cache_hits_total") <= added("vllm:prefix_cache_queries_total")
    assert added("kvmosaic:chunk_lookups_total") == 0


def test_blocks_of_each_pool_add_up_and_idle_ones_do_not_count_as_used(server: RunningServer) -> None:
    ask(server, documents=documents("Torren"))
    wait_until(lambda: Look(server)("vllm:num_requests_running") == 0)
    look, kv_cache = Look(server), server.llm.engine.kv_cache
    for pool, has in (("request", kv_cache.request_pool), ("chunk_cache", kv_cache.chunk_pool)):
        assert look("kvmosaic:pool_blocks", pool=pool) == has.num_blocks
        assert look("kvmosaic:pool_blocks", pool=pool, state="free") == has.num_free
        assert look("kvmosaic:pool_blocks", pool=pool, state="idle") == has.num_used > 0
        assert look("kvmosaic:pool_blocks", pool=pool, state="held") == 0
        block_bytes = server.llm.engine.runner.storages[pool].bytes_per_block  # type: ignore[index]
        assert look("kvmosaic:pool_bytes", pool=pool) == has.num_blocks * block_bytes
    assert look("vllm:kv_cache_usage_perc") == 0
    assert look("kvmosaic:tenant_chunk_bytes", tenant="default") == look(
        "kvmosaic:pool_bytes", pool="chunk_cache", state="idle"
    )


def test_pinned_chunks_are_held(server: RunningServer) -> None:
    ask(server, documents=documents("Talmira"))

    def pin(engine: Engine) -> int:
        return engine.kv_cache.pin("Talmira", salt=None, tenant="default")

    added = difference(server, lambda: server.call(server.services.engine.call, pin))
    assert added("kvmosaic:chunk_pinned_entries") == 1
    assert added("kvmosaic:pool_blocks", pool="chunk_cache", state="held") > 0
    assert added("kvmosaic:pool_blocks", pool="chunk_cache") == 0


def test_replies_are_counted_by_route_never_by_address(server: RunningServer) -> None:
    def wander() -> None:
        for number in range(3):
            httpx.get(f"{server.url}/v1/documents/none-{number}")
            httpx.get(f"{server.url}/nowhere/{number}")
            httpx.request(f"BREW{number}", f"{server.url}/nowhere")

    added = difference(server, wander)
    assert added("kvmosaic:http_requests_total", route="/v1/documents/{document_id}", status="404") == 3
    assert added("kvmosaic:http_requests_total", route="other", method="GET", status="404") == 3
    assert added("kvmosaic:http_requests_total", route="other", method="other") == 3
    routes = {dict(labels)["route"] for name, labels in Look(server).samples if name == "kvmosaic:http_requests_total"}
    assert not any("none" in route or "nowhere" in route for route in routes)


def test_a_stored_document_is_counted(server: RunningServer) -> None:
    body = {"id": "handbook", "text": "Wear a helmet."}
    added = difference(server, lambda: httpx.post(f"{server.url}/v1/documents", json=body).raise_for_status())
    assert added("kvmosaic:documents") == 1
    assert added("kvmosaic:document_bytes") == len("Wear a helmet.")


def test_a_client_that_leaves_is_counted_as_cancelled(server: RunningServer) -> None:
    def leave() -> None:
        body = {"model": server.model, "prompt": "Once upon a time", "stream": True, "max_tokens": 400}
        body["ignore_eos"] = True
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
            next(reply.iter_lines())
        wait_until(lambda: not server.services.admission.num_under_way)

    added = difference(server, leave)
    assert added("kvmosaic:requests_total", route="/v1/completions", status="cancelled") == 1
    assert added("vllm:request_success_total", finished_reason="abort") == 1
    assert added("vllm:e2e_request_latency_seconds_count") == 0


def test_scrapes_and_probes_under_load_wait_no_longer_than_the_event_loop(server: RunningServer) -> None:
    """The engine is busy with 20 chats; the event loop itself is what `/livez` measures."""
    done = threading.Event()

    def chat(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            while not done.is_set():
                own = [{"id": f"{number}", "text": f"{time.monotonic()} " + "The ferry leaves at noon. " * 40}]
                body = {"model": server.model, "max_tokens": 16, "ignore_eos": True, "documents": own}
                message = {"role": "user", "content": "When?"}
                client.post(CHAT, json={**body, "messages": [message]}).raise_for_status()

    waits: dict[str, list[float]] = {"/livez": [], "/readyz": [], "/metrics": []}
    with ThreadPoolExecutor(20) as pool, httpx.Client(base_url=server.url, timeout=300) as client:
        chats = [pool.submit(chat, number) for number in range(20)]
        try:
            wait_until(lambda: server.services.engine.num_running >= 10)
            for _ in range(60):
                for path, times in waits.items():
                    begin = time.monotonic()
                    assert client.get(path).status_code == 200
                    times.append(time.monotonic() - begin)
        finally:
            done.set()
        for each in chats:
            each.result()
    alone = scrape_seconds(server)
    longest = {path: sorted(times)[-3] for path, times in waits.items()}
    print({path: f"{seconds:.3f} s" for path, seconds in longest.items()}, f"alone {alone:.3f} s")
    assert longest["/readyz"] <= 5 * longest["/livez"] + 0.05
    assert longest["/metrics"] <= 5 * longest["/livez"] + 20 * alone + 0.05


def test_a_scrape_does_not_wait_for_a_long_step(server: RunningServer) -> None:
    busy, done = threading.Event(), threading.Event()

    def long_step(engine: Engine) -> None:
        busy.set()
        done.wait(300)

    step = threading.Thread(target=lambda: server.call(server.services.engine.call, long_step))
    step.start()
    try:
        assert busy.wait(60)
        time.sleep(0.15)  # what is known is too old now
        for _ in range(3):
            assert httpx.get(server.url + "/readyz").status_code == 200
            reply = httpx.get(server.url + "/metrics")
            assert reply.status_code == 200 and not done.is_set()
        assert server.services.engine.num_waiting == 0, "a scrape asks the engine for nothing"
        (age,) = [line for line in reply.text.splitlines() if line.startswith("kvmosaic:snapshot_age_seconds{")]
        assert float(age.split()[-1]) > 0.15
    finally:
        done.set()
        step.join()
    look = Look(server)
    assert look("kvmosaic:snapshot_age_seconds") < 5
    assert look("kvmosaic:engine_up") == 1


def test_an_engine_that_has_stopped_is_seen_and_its_last_numbers_stay() -> None:
    with RunningServer() as server:
        ask(server, documents=documents("Amber"))
        lookups = Look(server)("kvmosaic:chunk_lookups_total")
        server.call(server.services.engine.close)
        look = Look(server)
        assert look("kvmosaic:engine_up") == 0
        assert look("kvmosaic:chunk_lookups_total") == lookups == 1


def test_only_an_admin_sees_the_metrics_and_quotas_are_in_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "- {key: key-of-admin, tenant: boss, admin: true}\n- {key: key-of-acme, tenant: acme, quota: 1MiB}\n"
    )
    with RunningServer(keys_file=keys) as server:

        def status(key: str | None) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return httpx.get(server.url + "/metrics", headers=headers).status_code

        assert [status(None), status("key-of-nobody"), status("key-of-acme")] == [401, 401, 403]
        reply = httpx.get(server.url + "/metrics", headers={"Authorization": "Bearer key-of-admin"})
        assert 'kvmosaic:tenant_quota_bytes{model_name="reader",tenant="acme"} 1.048576e+06' in reply.text
        assert 'tenant_quota_bytes{model_name="reader",tenant="boss"}' not in reply.text
        assert 'route="other",status="401"} 2.0' in reply.text


def test_the_number_of_tenants_does_not_set_the_number_of_series(tmp_path: Path) -> None:
    names = [f"tenant-{number}" for number in range(1_000)]
    asking = (names[0], names[MAX_TENANTS], names[-1])
    with of_tenants(names[: MAX_TENANTS + 1], asking[:2], tmp_path) as few, of_tenants(names, asking, tmp_path) as many:
        reply = httpx.get(many.url + "/metrics", headers=authorized(names[0]))
        families = {family.name: family.samples for family in parse_text(reply.text)}
        held = {sample.labels["tenant"]: sample.value for sample in families["kvmosaic:tenant_chunk_bytes"]}
        assert set(held) == {*names[:MAX_TENANTS], OTHERS}
        assert held[OTHERS] == 2 * held[names[0]] > 0 and sum(held.values()) == 3 * held[names[0]]
        assert len(families["kvmosaic:tenant_quota_bytes"]) == MAX_TENANTS
        (stored,) = families["kvmosaic:documents"]
        assert stored.value == 3
        assert max(len(samples) for samples in families.values()) < 300 and len(reply.content) < 2**17
        assert len(many.services.engine.figures.usages) == 1_000
        assert scrape_seconds(many) < 2 * scrape_seconds(few)


def authorized(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}-key"}


@contextmanager
def of_tenants(names: Sequence[str], asking: Sequence[str], folder: Path) -> Iterator[RunningServer]:
    """A server that knows these tenants; those who are `asking` have read and stored a document each."""
    keys = folder / f"{len(names)}.yaml"
    keys.write_text("".join(f"- {{key: {name}-key, tenant: {name}, quota: 1MiB, admin: true}}\n" for name in names))
    with RunningServer(keys_file=keys) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        body = {"model": server.model, "max_tokens": 1, "messages": [{"role": "user", "content": "When?"}]}
        for name in asking:
            client.headers.update(authorized(name))
            client.post(CHAT, json={**body, "documents": documents("Corlow")}).raise_for_status()
            draft = {"id": "handbook", "text": "Wear a helmet."}
            client.post("/v1/documents", json=draft).raise_for_status()
        yield server


def scrape_seconds(server: RunningServer) -> float:
    """Least CPU seconds of some scrapes, on the server's event loop."""
    return server.call(lambda: least_cpu_seconds(lambda: server.services.metrics.expose(None), tries=20))


def test_repairs_are_counted_by_policy_without_its_numbers(server: RunningServer) -> None:
    def repaired(policy: str, repaired_tokens: int, computed_tokens: int) -> None:
        use = RepairUse(policy, 100, repaired_tokens, computed_tokens, 0.2, 4.0)
        delta = RequestDelta("r", (), ReuseReport(repair=use), False, None, 0)
        server.call(server.services.metrics.observe_delta, delta)

    def some() -> None:
        repaired("query(0.15)", 15, 15)
        repaired("query(0.3)", 30, 10)
        repaired("<object that is not ours>", 1, 1)

    added = difference(server, some)
    assert added("kvmosaic:repairs_total", policy="query") == 2
    assert added("kvmosaic:repairs_total", policy="other") == 1 and added("kvmosaic:repairs_total") == 3
    assert added("kvmosaic:repaired_tokens_total", action="computed") == 26
    assert added("kvmosaic:repaired_tokens_total", action="reused") == 20
    assert added("kvmosaic:repair_seconds_count") == 3 and added("kvmosaic:repair_seconds_sum") == 0.012
    assert difference(server, lambda: ask(server, documents=documents("mill")))("kvmosaic:repairs_total") == 0
