"""Simulation of a cache over many nodes."""
