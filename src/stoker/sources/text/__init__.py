"""Sources over files of lines: text and JSON, read by the offsets of the lines."""
