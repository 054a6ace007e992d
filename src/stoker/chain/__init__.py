"""A pipeline as a value, its position and epochs, and what it answers to those who iterate it."""
