"""Where examples are kept when several places share one budget, and which of them."""
