"""What other packages, and stoker's own rooms on top, add to the core: found by entry points.

The core imports none of them. Each is registered in the metadata of its package
(``[project.entry-points."stoker.workers"]`` in ``pyproject.toml``), and loaded when it is named.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

CACHES = "stoker.caches"
"""Caches over several nodes, by the name in ``.cache(cluster=NAME)``; see ``stages.cache``."""
WORKERS = "stoker.workers"
"""Kinds of workers, by the name in ``.workers(n, kind=NAME)``; see ``engine.workers.make``."""


def names(group: str) -> list[str]:
    """Return the names that are registered in a group, sorted."""
    return sorted(_points(group))


def load(group: str, name: str) -> Any:
    """Return what is registered under a name.

    Raises LookupError where nothing is, and whatever importing it raises.
    """
    point = _points(group).get(name)
    if point is None:
        raise LookupError(
            f"no installed package registers {name!r} in {group}; stoker's own names "
            "need it installed (pip install): sources on the path register nothing"
        )
    return point.load()


@cache
def _points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
