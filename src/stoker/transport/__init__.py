"""Values on their way: as bytes, in shared memory, between processes and between hosts."""
