"""Cluster membership: keepers named by the user, under torchrun, or in Ray."""
