"""Cluster membership: keepers at addresses from the user, under torchrun, or in Ray."""
