"""Measuring: workloads from a seed, engines side by side, the limits of the machine, tables and plots."""
