"""Shared memory and transport, for worker processes and feeds alike."""
