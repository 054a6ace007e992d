"""The points between segments, where a stage puts a stream of its own on top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.engine.plan.segment import Segment


@dataclass
class OwnPoint:
    """The point of a stage that puts a stream of its own on top.

    Attributes:
        stage: a ``StreamStage`` (``engine/stream_stage.py``), or a ``Sift`` of filters and skips
            (``engine/lowering.py``).
        holds_batches: whether its items are batches.
        on_device: whether it comes after ``.to_torch(device)``.
        group: the number of items in a batch; 1 if items are batches.
        leaks: whether stages behind it may drop items.
        at: its position among the parts.
    """

    stage: Any
    holds_batches: bool
    on_device: bool
    group: int = 1
    leaks: bool = False
    at: int = 0

    @property
    def kind(self) -> str | None:
        kind: str | None = self.stage.kind
        return kind

    @property
    def needs_work_behind(self) -> bool:
        return not self.stage.traits.moves

    @property
    def is_decided(self) -> bool:
        is_decided: bool = self.stage.is_decided
        return is_decided


Part = Segment | OwnPoint
"""A part of a plan. ``kind`` is the kind of its node in a state, or None without a node;
``needs_work_behind``: a segment follows it; ``is_decided``: values decide how many come out."""
