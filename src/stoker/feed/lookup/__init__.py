"""Finding a feed's feeder: on this host, through a relay, or in a Ray cluster."""
