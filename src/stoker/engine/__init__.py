"""Running an epoch: streams of work between pools."""
