from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.examples import examples

from kvmosaic.metrics import Family, Meters, Sample, SampleCollector, expose

ASKED = Family("kvmosaic:asked", "counter", "Questions.", ("model_name",))
ENDED = Family("kvmosaic:ended", "counter", "Ends.", ("model_name", "status"))
TOOK = Family("kvmosaic:took_seconds", "histogram", "Time.", ("model_name",), (0.1, 1.0))
FILL = Family("kvmosaic:fill", "gauge", "Blocks.", ("model_name", "pool"))
FOUND = Family("kvmosaic:found_seconds", "summary", "Time.", ("model_name",))
MODEL = {"model_name": "reader"}
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"


def meters(*families: Family) -> tuple[CollectorRegistry, Meters]:
    registry = CollectorRegistry()
    return registry, Meters(registry, families, MODEL)


def test_series_without_further_labels_are_there_at_zero_before_anything_happens() -> None:
    registry, _ = meters(ASKED, ENDED, TOOK)
    assert registry.get_sample_value("kvmosaic:asked_total", MODEL) == 0
    assert registry.get_sample_value("kvmosaic:took_seconds_count", MODEL) == 0
    assert registry.get_sample_value("kvmosaic:ended_total", {**MODEL, "status": "complete"}) is None


def test_counters_add_up_by_label() -> None:
    registry, counted = meters(ASKED, ENDED)
    counted.add(ASKED)
    counted.add(ASKED, 2)
    counted.add(ENDED, status="failed")
    assert registry.get_sample_value("kvmosaic:asked_total", MODEL) == 3
    assert registry.get_sample_value("kvmosaic:ended_total", {**MODEL, "status": "failed"}) == 1


def test_histograms_count_every_value_in_all_buckets_above_it() -> None:
    registry, counted = meters(TOOK)
    for seconds in (0.05, 0.5, 5.0):
        counted.observe(TOOK, seconds)
    bounds = ("0.1", "1.0", "+Inf")
    counts = [registry.get_sample_value("kvmosaic:took_seconds_bucket", {**MODEL, "le": bound}) for bound in bounds]
    assert counts == [1, 2, 3]
    assert registry.get_sample_value("kvmosaic:took_seconds_sum", MODEL) == pytest.approx(5.55)


def test_two_servers_in_one_process_count_apart() -> None:
    (one, counted), (other, _) = meters(ASKED), meters(ASKED)
    counted.add(ASKED)
    assert one.get_sample_value("kvmosaic:asked_total", MODEL) == 1
    assert other.get_sample_value("kvmosaic:asked_total", MODEL) == 0


def test_readings_are_asked_for_at_every_look_and_grouped_by_family() -> None:
    fill = iter((1.0, 2.0))

    def read() -> list[Sample]:
        now = next(fill)
        return [
            Sample(FILL, now, {"pool": "request"}),
            Sample(FOUND, 0.25, count=5),
            Sample(FILL, now * 10, {"pool": "chunk_cache"}),
        ]

    registry = CollectorRegistry()
    registry.register(SampleCollector(read, MODEL))
    text, _ = expose(registry, None)
    assert text.count(b"# TYPE kvmosaic:fill gauge") == 1
    assert b'kvmosaic:fill{model_name="reader",pool="request"} 1.0' in text
    assert b'kvmosaic:fill{model_name="reader",pool="chunk_cache"} 10.0' in text
    assert b'kvmosaic:found_seconds_sum{model_name="reader"} 0.25' in text
    assert b'kvmosaic:found_seconds_count{model_name="reader"} 5.0' in text
    assert b'pool="request"} 2.0' in expose(registry, None)[0]


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/plain;version=1.0.0", False),
        (OPENMETRICS, True),
        ("Application/OpenMetrics-Text", True),
        ("application/openmetrics-text; version=nonsense; escaping=\x7f", True),
        ("application/openmetrics-text;q=0, text/plain", False),
        (";;,,=", False),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str | None, is_openmetrics: bool) -> None:
    registry, _ = meters(ASKED, TOOK)
    text, content_type = expose(registry, accept)
    assert text.endswith(b"# EOF\n") == is_openmetrics
    assert content_type.startswith("application/openmetrics-text" if is_openmetrics else "text/plain; version=0.0.4")


@pytest.mark.parametrize("accept", [None, OPENMETRICS])
def test_no_series_tells_when_it_was_made(accept: str | None) -> None:
    registry, counted = meters(ASKED, TOOK)
    counted.add(ASKED)
    assert b"_created" not in expose(registry, accept)[0]


@settings(max_examples=examples(40))
@given(name=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_in_a_label_comes_back_from_both_formats(name: str) -> None:
    registry = CollectorRegistry()
    Meters(registry, [ASKED], {"model_name": name}).add(ASKED)
    for accept, parse in ((None, parse_text), (OPENMETRICS, parse_openmetrics)):
        (family,) = parse(expose(registry, accept)[0].decode())
        assert [(sample.labels["model_name"], sample.value) for sample in family.samples] == [(name, 1.0)]
