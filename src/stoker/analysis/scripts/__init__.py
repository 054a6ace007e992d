"""A training script as a job under analysis."""
