"""Examples become batches, and short sequences full ones."""
