"""Shuffling: a new order every epoch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shuffle:
    """The stage ``.shuffle()``: a permutation keyed by seed and epoch (see ``Order``)."""

    name: str = "shuffle()"
