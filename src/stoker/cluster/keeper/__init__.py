"""A keeper: one node's store, served to the processes of other nodes."""
