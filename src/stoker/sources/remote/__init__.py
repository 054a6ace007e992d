"""Sources over files at URLs."""
