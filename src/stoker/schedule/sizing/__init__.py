"""Work divided by the sizes of examples: equal work for ranks, batches of about equal size."""
