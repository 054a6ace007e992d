"""What files of results share: where they were made, and being written whole or not at all."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from stoker.basics.resources import usable_cores

_PACKAGES = ("numpy", "torch", "pillow", "scikit-learn", "matplotlib")


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def this_machine() -> dict[str, Any]:
    """Describe where results are made, ready for JSON."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "usable_cores": usable_cores(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
