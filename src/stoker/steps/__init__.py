"""Stages that put a stream of their own on top, and sources that are iterated: one in each file."""
