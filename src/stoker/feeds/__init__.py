"""Feeds: one process prepares each epoch once for many jobs (Mohan et al., VLDB 2021, 6.3)."""
