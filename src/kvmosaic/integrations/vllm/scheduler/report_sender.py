"""Delivery of reports from the scheduler to the API server that answers the request."""

from __future__ import annotations

import json
from typing import Any

from kvmosaic.integrations.vllm.report import HEADER


class ReportSender:
    """Sends each report with the first output of its request, in its `trace_headers`.

        request.trace_headers ──▶ EngineCoreOutput.trace_headers ──▶ the API server with this request
                       {…, HEADER: report}                             front/engine_outputs.py

    vLLM copies these headers to every output, and reads only those of tracing. Its other ways lose reports: a finished
    request's `kv_transfer_params` where the API server ends an answer at a stop string, or streams it (before 0.33);
    statistics with `--disable-log-stats`, and with several API servers, of which one receives them.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[Any, Any]] = {}
        """By id: requests without an output yet, and their own headers."""

    def send(self, request: Any, report: dict[str, Any]) -> None:
        """Adds the report to the next output of a request."""
        self._sent[request.request_id] = request, request.trace_headers
        request.trace_headers = {**(request.trace_headers or {}), HEADER: json.dumps(report)}

    def remove_delivered(self) -> None:
        """Restores the headers of requests that have an output; called in every step."""
        for request_id in [name for name, (request, _) in self._sent.items() if request.num_output_tokens]:
            request, headers = self._sent.pop(request_id)
            request.trace_headers = headers

    def forget(self, request_id: str) -> None:
        """Drops a finished request; its last output keeps the headers."""
        self._sent.pop(request_id, None)
