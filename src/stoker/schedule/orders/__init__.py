"""Which example is at which place of an epoch: maps from places to numbers of the source."""
