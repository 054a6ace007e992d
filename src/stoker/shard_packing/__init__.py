"""Turning a source into shards: ``stoker pack``."""
