"""Training of the bundled reader model."""
