"""Spans of requests, for OpenTelemetry: one trace per HTTP request, from the engine's timestamps.

`export` makes and sends spans, `request_trace` says which. Both import OpenTelemetry, so they are imported only if
`--otlp-traces-endpoint` is set.
"""
