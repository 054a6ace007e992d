"""The parts of the feeder, which prepares each output once and sends it to all jobs."""
