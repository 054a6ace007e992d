"""How a job finds the feeder that prepares for it."""
