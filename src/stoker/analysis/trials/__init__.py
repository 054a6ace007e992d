"""Small trials on the job's own files: reading them again, from a shard, and by requests."""
