"""Shuffling: a new order every epoch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shuffle:
    """The stage ``.shuffle()``: a permutation keyed by seed and epoch (see ``orders``).

    Attributes:
        buffer: of a stream, how many examples are shuffled among each other; 0 otherwise.
    """

    buffer: int = 0

    @property
    def name(self) -> str:
        """Name the stage for people."""
        return f"shuffle({f'buffer={self.buffer:,}' if self.buffer else ''})"
