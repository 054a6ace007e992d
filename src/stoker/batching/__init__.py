"""Puts examples together in the arrays of a batch."""
