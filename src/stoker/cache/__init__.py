"""The cache that never evicts."""
