"""Reports on their way from the scheduler to the API server that answers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvmosaic.vllm.report import HEADER, ReportSender, ReportShelf, shelve_reports

REPORT = {"segments": [{}], "bypass": None}


class OutputProcessor:
    """Like vLLM's: it is called with the outputs of a step."""

    def process_outputs(self, outputs: list[Any], when: float | None = None) -> tuple[list[str], float | None]:
        return [output.request_id for output in outputs], when


def output(name: str, headers: Any = None, params: Any = None) -> Any:
    return SimpleNamespace(request_id=name, trace_headers=headers, kv_transfer_params=params)


def request(**fields: Any) -> Any:
    return SimpleNamespace(request_id="chatcmpl-7", trace_headers=None, num_output_tokens=0, **fields)


@pytest.fixture
def shelf() -> ReportShelf:
    return ReportShelf()


@pytest.fixture
def processor(shelf: ReportShelf) -> OutputProcessor:
    processor = OutputProcessor()
    state = SimpleNamespace(engine_client=SimpleNamespace(output_processor=processor))
    for _ in range(2):
        shelve_reports(state, shelf)
    return processor


def test_first_output_brings_the_report_and_a_finished_one_another_way(
    processor: OutputProcessor, shelf: ReportShelf
) -> None:
    first = output("a", {"traceparent": "x", HEADER: json.dumps(REPORT)})
    last = output("b", params={"kvmosaic": REPORT, "other": 1})
    assert processor.process_outputs([first, last], when=1.0) == (["a", "b"], 1.0)
    assert (shelf.take("a"), shelf.take("b")) == (REPORT, REPORT)


@pytest.mark.parametrize("params", [None, {}, {"kvmosaic": {"bypass": "x"}}, {"kvmosaic": 3}, {"other": {}}])
def test_outputs_without_a_report_leave_none(processor: OutputProcessor, shelf: ReportShelf, params: Any) -> None:
    processor.process_outputs([output("a", {}, params)])
    assert len(shelf) == 0


@pytest.mark.parametrize("state", [SimpleNamespace(), SimpleNamespace(engine_client=SimpleNamespace())])
def test_another_engine_client_is_left_alone(state: Any) -> None:
    shelve_reports(state)


def test_report_travels_until_the_first_output_and_the_requests_own_headers_stay() -> None:
    sender, asked = ReportSender(), request()
    asked.trace_headers = own = {"traceparent": "x"}
    sender.send(asked, REPORT)
    sender.remove_delivered()
    assert asked.trace_headers["traceparent"] == "x" and json.loads(asked.trace_headers[HEADER]) == REPORT
    assert HEADER not in own
    asked.num_output_tokens = 1
    sender.remove_delivered()
    assert asked.trace_headers is own
    sender.forget(asked.request_id)


def test_a_finished_request_keeps_the_headers_for_its_last_output() -> None:
    sender, asked = ReportSender(), request()
    sender.send(asked, REPORT)
    sender.forget(asked.request_id)
    asked.num_output_tokens = 1
    sender.remove_delivered()
    assert HEADER in asked.trace_headers
