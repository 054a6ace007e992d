"""Ray actors as the workers of a run."""
