"""Users' functions: how stages call them, and what they may draw."""
