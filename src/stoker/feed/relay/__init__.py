"""Feeds of other hosts: one relay on each host fetches once for all its jobs."""
