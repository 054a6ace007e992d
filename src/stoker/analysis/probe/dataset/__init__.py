"""Looks at the script's dataset: at an example, and at what it holds."""
