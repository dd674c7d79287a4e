"""Routes of the engine: health probes, sleep, and the prefix tree of its cache."""
