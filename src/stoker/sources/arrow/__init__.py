"""Sources over Arrow tables: Parquet files, data frames, Hugging Face's data sets."""
