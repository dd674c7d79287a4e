"""Benchmarks: seeded workloads, engines side by side, limits of the machine, tables and plots."""
