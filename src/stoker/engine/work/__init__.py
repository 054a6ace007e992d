"""Does a segment's work on its inputs, in any thread or process."""
