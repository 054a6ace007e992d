"""Sources over archives: tar and zip shards, read by the offsets of the files in them."""
