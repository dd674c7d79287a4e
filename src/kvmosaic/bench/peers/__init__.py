"""Engines that are measured side by side."""
