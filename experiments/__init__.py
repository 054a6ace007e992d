"""Experiments with stoker, the demonstration first: run from the repository, not in the package.

A small network is trained from one recipe, fed in different ways (`arms`) from storage that is too
slow for it (`storage`); what comes of it is summed up (`report`) and drawn (`pictures`).
"""
