"""What Python sees after ``pip install stoker``: what it requires, and no extras."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from packaging.requirements import Requirement


def make_bare_environment(folder: Path, *packages: str) -> None:
    """Link packages, and all that they cannot do without, into a folder.

    Python with ``-S`` and that folder in ``PYTHONPATH`` sees nothing else that is installed.
    """
    required: set[str] = set()
    for package in packages:
        _add_required(package, required)
    for package in required:
        distribution = importlib.metadata.distribution(package)
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            os.symlink(str(distribution.locate_file(name)), folder / name)


def requirements(package: str) -> list[str]:
    """Return the names of the packages that a package cannot do without."""
    found = map(Requirement, importlib.metadata.requires(package) or ())
    return [r.name for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def _add_required(package: str, required: set[str]) -> None:
    if package not in required:
        required.add(package)
        for name in requirements(package):
            _add_required(name, required)
