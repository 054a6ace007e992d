"""The feeder's parts: it prepares each output of one pipeline once and sends it to all jobs."""
