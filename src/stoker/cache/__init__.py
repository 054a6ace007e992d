"""The example cache: a store on one host, shared by its processes, that never evicts."""
