"""The feeder: makes the outputs of one pipeline once, and hands them to all jobs."""
