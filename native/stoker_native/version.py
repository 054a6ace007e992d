"""The version, read by the build."""

__version__ = "0.5.0"
