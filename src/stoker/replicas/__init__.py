"""Copies of users' objects: each worker thread calls its own. What cannot be copied, and why."""
