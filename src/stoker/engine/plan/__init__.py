"""From a chain to what the engine runs for it: segments of work, and the points between them."""
