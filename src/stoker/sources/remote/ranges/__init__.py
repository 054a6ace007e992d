"""Sources that read parts of files at URLs: row groups of Parquet, windows of tokens."""
