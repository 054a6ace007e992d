"""What is used next and how often: integers only."""
