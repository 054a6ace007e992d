"""Actors of Ray as workers of a run."""
