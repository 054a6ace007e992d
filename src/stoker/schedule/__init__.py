"""The schedule of examples: the next one, and the number of its uses, by integers only."""
