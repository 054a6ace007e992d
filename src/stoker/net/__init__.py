"""Connections between hosts: authenticated, and of frames that are checked before they are used."""
