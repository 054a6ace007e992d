"""Arrow tables and what is made of them: Parquet files, data frames, Hugging Face's data sets."""
