"""Keeps a training script from slowing: several runs of it, conditions, and what they decide."""
