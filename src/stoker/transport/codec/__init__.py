"""Values as bytes, for stores, for other nodes and for jobs on other hosts; nothing is pickled."""
