"""Replays of recorded traffic: readers of public traces, a simulation of the caches, and runs with a real engine."""
