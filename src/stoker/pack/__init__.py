"""Many files into shards."""
