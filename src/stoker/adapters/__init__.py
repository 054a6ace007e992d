"""What stands around loaders and pipelines: watching how long somebody waits for them."""
