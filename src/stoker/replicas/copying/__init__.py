"""Copies one graph of users' objects, each kind in its own way, and checks if it is current."""
