"""Transport of values: as bytes, in shared memory, between processes and hosts."""
