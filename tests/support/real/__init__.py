"""The oracle and the prompts of the tests on a real model."""
