"""What was found, and what to do: on a terminal, as a page, as data."""
