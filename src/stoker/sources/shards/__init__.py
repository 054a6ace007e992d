"""Archives of many files, read by offset: tar shards as WebDataset has them, and zip."""
