"""Sources of examples: one source a module."""
