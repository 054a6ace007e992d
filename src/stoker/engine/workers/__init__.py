"""Who does the work of an epoch: threads, processes, or the consumer itself."""
