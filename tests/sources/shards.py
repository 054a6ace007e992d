"""Archives for tests."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path


def pack(path: Path, files: dict[str, bytes], form: int = tarfile.GNU_FORMAT) -> str:
    """Make an archive: zip (half of it deflated) by its suffix, else tar."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for number, (name, data) in enumerate(files.items()):
                kind = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
                archive.writestr(name, data, kind)
        return str(path)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def pairs(first: int, count: int) -> dict[str, bytes]:
    """Return an image and a class for each example."""
    files = {}
    for n in range(first, first + count):
        files[f"{n:06}.jpg"] = b"image %d" % n * (n % 7)
        files[f"{n:06}.cls"] = b"%d" % (n % 10)
    return files
