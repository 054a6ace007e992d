"""Ranks: this process's shard, and the exchange between ranks."""
