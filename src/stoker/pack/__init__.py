"""Packing many small files into shards."""
