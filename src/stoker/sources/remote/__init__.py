"""Sources over files behind a URL."""
