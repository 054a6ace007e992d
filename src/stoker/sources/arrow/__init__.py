"""Sources over Arrow tables: Parquet files, DataFrames, Hugging Face datasets."""
