"""One copy of a graph of users' objects, each kind in its own way, and whether it is current."""
