"""The first minutes on a GPU: numbers, graphs, our engine, vLLM, and the limits of the device; see `__main__`."""
