"""Where examples come from: one source a file."""
