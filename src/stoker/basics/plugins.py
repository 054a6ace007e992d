"""Entry points: names that other packages, and stoker's own rooms on top, add to the core.

The core imports none of them. Each is registered in the metadata of its package
(``[project.entry-points."stoker.workers"]`` in ``pyproject.toml``), and imported when its name is
used. A name that stoker registers stays stoker's, whatever other packages register.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

CACHES = "stoker.caches"
"""Caches over several nodes, by the name in ``.cache(cluster=NAME)``; see ``stages.cache``."""
COMMANDS = "stoker.commands"
"""Commands: ``hello`` is ``stoker hello``, and ``cache.hello`` is ``stoker cache hello``.

Each is a function whose parameters say what it takes; see ``cli``.
"""
NAMES = "stoker.names"
"""Names that are reached as ``stoker.NAME``; see the package's ``__init__``."""
WORKERS = "stoker.workers"
"""Kinds of workers, by the name in ``.workers(n, kind=NAME)``; see ``engine.workers.make``."""


def names(group: str) -> list[str]:
    """Return the names that are registered in a group, sorted."""
    return sorted(_points(group))


def is_own(group: str, name: str) -> bool:
    return _is_own(_points(group)[name][0])


def load(group: str, name: str) -> Any:
    """Import and return the object that is registered under a name.

    Raises LookupError if there is none, or several packages claim it; ImportError, with the cause.
    """
    points = _points(group).get(name)
    if points is None:
        raise LookupError(
            f"no installed package registers {name!r} in {group}; stoker itself must be installed "
            "(pip install) for its own names: a source folder on sys.path registers nothing"
        )
    if len(points) > 1:
        claimants = ", ".join(map(_package, points))
        raise LookupError(f"{claimants} all register {name!r} in {group}: keep one of them")
    (point,) = points
    try:
        return point.load()
    except Exception as error:  # another package's code may raise anything
        raise ImportError(
            f"{_package(point)}, which registers {name!r} in {group}, cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


@cache
def _points(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of each name; stoker's alone if it is among them."""
    from importlib.metadata import entry_points  # 15 ms of every start, and few ask

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return {name: list(filter(_is_own, points)) or points for name, points in found.items()}


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "stoker"


def _package(point: EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"
