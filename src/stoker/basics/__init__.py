"""Basics that every room uses and that know nothing of data loading."""
