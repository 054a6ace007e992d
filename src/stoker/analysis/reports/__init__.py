"""Presents the findings and advice: on a terminal, as a page, as data."""
