"""Runs a training script as a job under analysis."""
