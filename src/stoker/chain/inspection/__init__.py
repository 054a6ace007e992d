"""What a pipeline shows of itself: as text, and one example or batch at a time."""
