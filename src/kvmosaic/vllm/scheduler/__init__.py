"""Scheduler side, in the engine process: finds cached chunks, plans moves, requests missing chunks."""
