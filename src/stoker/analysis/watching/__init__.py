"""Watches a training run from its own process: the stall, the waits, and why it becomes slow."""
