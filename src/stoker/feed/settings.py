"""The settings with which a feeder starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FeedSettings:
    """A feed: its name, its pipeline, and how it is prepared and shared.

    Attributes:
        name: the feed's name.
        target: ``FILE.py:FUNCTION`` or ``module:FUNCTION``.
        staging: how many items shared memory may hold; with a string, how many bytes.
        jobs: how many to wait for before the first epoch begins.
        patience_s: seconds that the other jobs wait for a job that does not respond.
        autostarted: whether a job starts the feeder, so that it ends with the last one.
        path: the feeder's ``sys.path``.
        listen: ``host:port`` for other hosts; empty for this host only.
        insecure: whether connections to other hosts are not encrypted.
    """

    name: str
    target: str
    staging: int | str | None = None
    jobs: int = 1
    patience_s: float = 60.0
    autostarted: bool = False
    path: tuple[str, ...] = ()
    listen: str = ""
    insecure: bool = False
