"""Echoing as it runs: pools of items that are used again."""
