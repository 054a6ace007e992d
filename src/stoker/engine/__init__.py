"""Running an epoch: a flow of layers, and the streams that they open."""
