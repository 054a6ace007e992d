"""``RemoteOptions``: the user's settings for reading files at URLs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.basics.validate import is_whole_number


@dataclass(frozen=True)
class RemoteOptions:
    """Settings for reading files at URLs, checked when made.

    Attributes:
        requests: the largest number of files read at a time.
        retry_s: for how many seconds after its first failure a file or a listing is requested
            again.
        storage_options: the arguments of fsspec's file system; a copy of the user's.

    Raises TypeError or ValueError for invalid values.
    """

    requests: int = 32
    retry_s: float = 60.0
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_whole_number(self.requests):
            raise TypeError(f"requests is a whole number, not {self.requests!r}")
        if self.requests < 1:
            raise ValueError(f"requests is at least 1, not {self.requests}")
        if not self.retry_s >= 0:
            raise ValueError(f"retry_s is a number of seconds, not {self.retry_s!r}")
        # A user may change the mapping later, and file systems are opened again and again.
        object.__setattr__(self, "storage_options", dict(self.storage_options))
