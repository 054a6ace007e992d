"""Looks into a pipeline: printed as text, and one example or batch at a time."""
