"""Tools around loaders and pipelines: monitors, metrics, displays, schedules, checks."""
