"""The keeper: it serves one node's store to the processes of other nodes."""
