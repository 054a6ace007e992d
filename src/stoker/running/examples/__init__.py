"""A dataset's examples: whether they are random, their identity, and their store."""
