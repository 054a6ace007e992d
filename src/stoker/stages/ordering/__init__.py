"""Which examples of an epoch come, and in which order, by their numbers alone."""
