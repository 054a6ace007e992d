"""Ranks: which part is this process's, and what the others say."""
