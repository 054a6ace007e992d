"""Feeds of other hosts: one relay on each host fetches each output once for all its jobs."""
