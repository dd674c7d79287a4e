"""Metrics of a server: counters and gauges for Prometheus, and the log of ended requests they are made from."""
