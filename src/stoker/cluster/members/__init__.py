"""Who belongs to a cluster: named by hand, under torchrun, or in Ray."""
