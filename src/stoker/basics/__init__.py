"""What every room uses, and what knows nothing of data loading."""
