"""In the engine process: which chunks are there, what is moved, and what is computed first."""
