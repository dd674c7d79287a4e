"""Peers: engines that are measured side by side."""
