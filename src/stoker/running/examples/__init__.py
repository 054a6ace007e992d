"""A dataset's examples: whether they are random, and their store."""
