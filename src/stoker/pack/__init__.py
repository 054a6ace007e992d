"""``stoker pack``: writes many small files into a few shards."""
