"""The outputs of segments: how many are made at once, by whom, and where their rows are put."""
