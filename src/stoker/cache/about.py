"""What a store's folder says about itself, in its file ``about.json``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.cache.directory import CacheFolder

FORMAT = 2
ABOUT = "about.json"
_MOST_BYTES = 1 << 20


class About(msgspec.Struct):
    """What a store's folder says about it."""

    format: int
    describes: str
    """What is in it, for people."""
    limit_bytes: int
    temporary: bool
    """Whether it goes with its last user."""
    made_s: float
    """When it was made, in seconds since 1970."""
    boot: str
    """Since when the machine runs on which it was used last."""
    clean: bool = False
    """Whether its last user closed it."""

    @classmethod
    def of(cls, folder: CacheFolder) -> About | None:
        """Read it; None where there is none that can be understood."""
        try:
            return msgspec.json.decode(folder.read(ABOUT, _MOST_BYTES), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def write(self, folder: CacheFolder) -> None:
        """Write it. Raises OSError."""
        folder.write(ABOUT, msgspec.json.encode(self))


def boot() -> str:
    """Return what tells this run of the machine from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return str(int(psutil.boot_time()))
