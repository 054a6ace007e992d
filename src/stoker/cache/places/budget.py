"""``stoker.budget(limit)``: one store that several caches fill, so that their sum has a limit.

The accounts are those of the store: LMDB refuses what does not fit (``cache.store``), for all
threads, processes and jobs, after kills as well. Keys differ by chain, so caches never mix.
"""

from __future__ import annotations

import os

from stoker.basics.resources import format_bytes
from stoker.errors import CacheError


class CacheBudget:
    """Memory, or room on a local disk, that several caches share; made by ``stoker.budget``.

    Picklable; it is a place and a size. The store is made by the first cache that opens it, and
    lives as long as a cache does that was given this budget, or a copy of it.

    Attributes:
        limit: bytes, a fraction of memory, or ``"auto"``.
        path: the store's folder on a disk; None in memory.
        keep: whether it stays after its last user; None: only with ``path``.
        on_damage: ``"rebuild"`` or ``"refuse"``.
        behind: the budget on a disk for what is not kept in this one, or None.
        folder: where the store is.
    """

    def __init__(
        self,
        limit: int | float | str,
        path: str | os.PathLike[str] | None,
        keep: bool | None,
        on_damage: str,
        behind: CacheBudget | None = None,
    ) -> None:
        # Not at the top: they import packages, which `import stoker` leaves alone.
        from stoker.cache import location
        from stoker.cache.identity import digest, private_identity

        self.limit = location.parse_limit(limit)
        self.path = None if path is None else location.local_folder(path)
        self.keep = keep
        self.on_damage = on_damage
        self.behind = behind
        self._used_for: tuple[bytes, str] | None = None
        if self.path is not None:
            self.folder = self.path
        else:
            name = f"budget-{digest(private_identity('budget')).hex()[:12]}"
            self.folder = os.path.join(location.memory_folder(), name)

    def use_for(self, contents: bytes, describes: str) -> None:
        """Note what it holds over several nodes, where each content has stores of its own.

        Raises CacheError if it holds something else already.
        """
        known = self._used_for = self._used_for or (contents, describes)
        if known[0] != contents:
            raise CacheError(
                f"{self!r} holds {known[1]} over several nodes, where a budget is for one "
                f"pipeline: give {describes} a budget of its own"
            )

    def __repr__(self) -> str:
        return f"stoker.budget({str(self)!r})"

    def __str__(self) -> str:
        return format_bytes(self.limit) if isinstance(self.limit, int) else str(self.limit)


def budget(
    limit: int | float | str = "auto",
    *,
    path: str | os.PathLike[str] | None = None,
    keep: bool | None = None,
    on_damage: str = "rebuild",
    behind: CacheBudget | None = None,
) -> CacheBudget:
    """Return a limit that several caches share: give it to each of them as its limit.

    Together they never hold more, whichever threads, processes and jobs fill them. In one pipeline,
    caches at several places keep each example at one of them (docs/caching.md). In several
    pipelines and ``stoker.cached`` datasets, examples enter as they come. Over several nodes
    (``cluster=``) it is for one pipeline, and the limit is that of each node.

    Args:
        limit: bytes (``"64GiB"``), a share of usable memory (``0.5``; with ``path`` of the free
            disk), or ``"auto"``: half (four fifths).
        path: a folder on a local disk; by default in memory, for this job.
        keep: whether it stays after its last user ends; by default only with ``path``. Each cache
            in it then needs a ``version=`` where stoker cannot identify its data and functions.
        on_damage: ``"rebuild"`` a damaged store, or ``"refuse"`` it (CacheError).
        behind: a budget with ``path`` behind this one in memory: it gets the examples that are
            worth less for their bytes than those in memory. Each stays where it entered.

    Raises TypeError or ValueError for wrong arguments.
    """
    if on_damage not in ("rebuild", "refuse"):
        raise ValueError(f"on_damage= must be 'rebuild' or 'refuse', not {on_damage!r}")
    if behind is not None:
        if not isinstance(behind, CacheBudget):
            raise TypeError(f"behind= takes a stoker.budget(..., path=...), not {behind!r}")
        if path is not None or behind.path is None or behind.behind is not None:
            raise ValueError(
                "behind= is one budget on a disk behind one in memory: "
                "stoker.budget(limit, behind=stoker.budget(limit, path=...))"
            )
    return CacheBudget(limit, path, keep, on_damage, behind)
