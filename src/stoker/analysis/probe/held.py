"""Which of the files that a process has open or mapped it reads.

What it merely inherited, such as a checkpoint that the training process has mapped, is not what
its loader reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

_FILE_PAGES = "3"  # clear_refs(5): of pages mapped from files


class Held:
    """The files that this process has open or mapped now, as they are before it reads on."""

    def __init__(self) -> None:
        self._positions = dict(_descriptors())
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write(_FILE_PAGES)
            self._cleared = True
        except OSError:  # then a mapping tells nothing of its use, and all of them count
            self._cleared = False

    def read(self, read_bytes: bool) -> Iterator[tuple[str, str]]:
        """Return (file, "held" or "mapped") of those that were read since.

        ``read_bytes``: whether the process read from files in a way that nothing else accounts for.
        """
        now = dict(_descriptors())
        moved = [what for what, position in now.items() if self._positions.get(what) != position]
        mapped = _mapped()
        if not moved and read_bytes:  # at positions of its own; a file that is mapped is not read
            moved = [what for what in now if what[1] not in mapped]
        for _, name in moved:
            yield name, "held"
        for name, touched in mapped.items():
            if touched or not self._cleared:
                yield name, "mapped"


def _descriptors() -> Iterator[tuple[tuple[int, str], int]]:
    """Return ((descriptor, file), position) of what is open for reading."""
    for text in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{text}")
            with open(f"/proc/self/fdinfo/{text}") as file:
                fields = dict(line.split(None, 1) for line in file if len(line.split()) > 1)
        except (OSError, ValueError):
            continue
        if name[:1] == "/" and not int(fields["flags:"], 8) & os.O_ACCMODE:
            yield (int(text), name), int(fields["pos:"])


def _mapped() -> dict[str, bool]:
    """Return the files that are mapped, programs apart, and whether they were touched."""
    found: dict[str, bool] = {}
    name = ""
    with open("/proc/self/smaps") as file:
        for line in file:
            parts = line.split(maxsplit=5)
            if "-" in parts[0]:
                is_data = len(parts) == 6 and "x" not in parts[1] and parts[5][0] == "/"
                name = parts[5].rstrip("\n") if is_data else ""
            elif name and parts[0] == "Referenced:":
                found[name] = found.get(name, False) or int(parts[1]) > 0
    return found
