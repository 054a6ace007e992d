"""The points between segments, where items are kept, dropped, joined, scanned or moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.engine.plan.segment import Segment
from stoker.stages.batching.pack import Pack
from stoker.stages.echo import Echo
from stoker.stages.scan import Scan
from stoker.stages.skip import Budget
from stoker.stages.to import To


@dataclass
class FilterPoint:
    """The point after a segment some of whose outputs do not survive.

    Attributes:
        budgets: the skip budgets, by account: 0 is the pipeline's, the others are those of stages
            that have one of their own.
        at: its place among the parts.
    """

    budgets: Mapping[int, Budget]
    at: int = 0
    kind = "filter"
    needs_work_behind = True
    is_one_to_one = True


@dataclass
class PackPoint:
    """The point where sequences are joined into full ones.

    Attributes:
        pack: the stage.
        at: its place among the parts.
    """

    pack: Pack
    at: int = 0
    kind = "pack"
    needs_work_behind = True
    is_one_to_one = False


@dataclass
class ScanPoint:
    """The point where a function with a state is called with one item after another.

    Attributes:
        scan: the stage.
        at: its place among the parts.
    """

    scan: Scan
    at: int = 0
    kind = "scan"
    needs_work_behind = True
    is_one_to_one = False


@dataclass
class EchoPoint:
    """A pool between two segments.

    Attributes:
        echo: the stage.
        holds_batches: whether its items are batches.
        on_device: whether it comes after ``.to(device)``.
        group: how many items a step of its pool has: one, where those are batches.
        leaks: whether uses may be left out behind it.
        at: its place among the parts.
    """

    echo: Echo
    holds_batches: bool
    on_device: bool
    group: int = 1
    leaks: bool = False
    at: int = 0
    kind = "echo"
    needs_work_behind = True
    is_one_to_one = True


@dataclass
class DevicePoint:
    """The point where batches move to a device.

    Attributes:
        to: the stage.
        at: its place among the parts.
    """

    to: To
    at: int = 0
    kind = None
    needs_work_behind = False
    is_one_to_one = True


Part = Segment | FilterPoint | PackPoint | ScanPoint | EchoPoint | DevicePoint
"""What a plan is made of. Each says its ``kind`` in a state, or None where nothing of it is kept
there; and whether each of its outputs ``is_one_to_one``: made of one input alone."""
