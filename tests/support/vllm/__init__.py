"""Real vLLM engines and servers for tests: vLLM is imported once, and each engine is a fork of this process."""
