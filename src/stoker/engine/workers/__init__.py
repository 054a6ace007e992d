"""The workers of an epoch: threads, processes, or the consumer itself."""
