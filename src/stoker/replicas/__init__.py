"""Copies of users' objects for worker threads, and the reasons why some objects have no copy."""
