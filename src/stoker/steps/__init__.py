"""Stages that put a stream of their own on top, each whole in one file."""
