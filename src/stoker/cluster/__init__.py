"""One cache over the memories of several nodes."""
