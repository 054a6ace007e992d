"""What an order in which slow examples come later costs, where two classes are the slow ones."""
