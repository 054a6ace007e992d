"""Tools around loaders and pipelines: monitors, a metrics server, schedules, caches."""
