"""Runs an unedited training script with what an analysis advises for its loaders."""
