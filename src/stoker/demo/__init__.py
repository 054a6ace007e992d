"""The demonstration: what echoing brings where storage is slower than training.

One small network is trained from one recipe, fed in different ways from storage that is emulated,
or a local HTTP server, and everything that comes of it is shown.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stoker.demo.needs import needed
from stoker.demo.settings import Settings

__all__ = ["run_demo"]


def run_demo(out: Path, seeds: int, full: bool, data: Path | None, remote: bool = False) -> None:
    """Run the demonstration; write `out/demo.json` and `out/demo.png`.

    Args:
        out: folder for the results, and for the images that are composed once.
        seeds: runs of each arm, at least 1.
        full: all arms, R = 1 included.
        data: a folder of images, one sub-folder a class, in place of the digits.
        remote: whether images come from a local HTTP server in place of emulated storage.

    Raises ImportError when a package of the extra `demo` is missing, OSError or ValueError
    when the data or the folder will not do. On Ctrl-C the runs that are over are written
    down before KeyboardInterrupt goes on.
    """
    # Not scikit-learn, which takes seconds to import: that is needed to compose digits, once.
    packages = ["torch", "PIL.Image", "matplotlib"]
    packages += ["fsspec", "aiohttp"] if remote else []
    for module in packages:
        needed(module)
    from stoker.demo.main import run_settings

    run_settings(replace(Settings(), seeds=seeds), out, full=full, data=data, remote=remote)
