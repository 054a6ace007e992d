"""Values as bytes, for stores, for other nodes and for relays; nothing is pickled."""
