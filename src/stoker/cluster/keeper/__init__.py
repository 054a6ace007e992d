"""The keeper: a server that gives processes of other nodes access to this node's store."""
