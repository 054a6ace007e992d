"""What users say of files behind URLs, whatever these hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.basics.validate import is_whole_number


@dataclass(frozen=True)
class RemoteOptions:
    """How files behind URLs are read; checked when it is made, and passed on whole.

    Attributes:
        requests: how many files are read (or folders listed) at a time, at most.
        retry_s: for how long after its first failure a file, or a listing, is asked for again.
        storage_options: what fsspec's file system is made with; a copy of what was given.

    Raises TypeError or ValueError for values that cannot be.
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
