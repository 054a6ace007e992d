"""Puts hooks on a class of loaders: where the script builds each, and what iterating it does."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

_OWN = os.path.abspath(__file__).removesuffix(os.path.join("analysis", "probe", "builders.py"))
Builders = tuple[tuple[str, ...], tuple[str, int]]
# Where the script built the loaders that it has.
_builders: weakref.WeakKeyDictionary[Any, Builders] = weakref.WeakKeyDictionary()


def hook_loaders(
    loader_class: Any,
    iterate: Callable[[Any, Callable[[Any], Any]], Any],
    put: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Have ``iterate(loader, start)`` stand for ``start(loader)``, which makes an iterator.

    Where a loader was built is noted in its ``_stoker_built`` and ``_stoker_place``. ``put`` sets
    an attribute of the class.
    """
    build = loader_class.__init__

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        note_builders(self)

    def hook(name: str) -> None:
        start = getattr(loader_class, name)

        @functools.wraps(start)
        def begin(self: Any) -> Any:
            return iterate(self, start)

        put(loader_class, name, begin)

    put(loader_class, "__init__", __init__)
    hook("__iter__")
    hook("_get_iterator")  # which loaders with an ``__iter__`` of their own may call


def note_builders(loader: Any) -> None:
    """Note in a loader where it is built; a subclass may build its parent twice."""
    own = loader.__dict__
    if "_stoker_built" not in own:
        own["_stoker_built"], own["_stoker_place"] = _find_builders(loader)


def name_loader(built: tuple[str, ...], taken: Mapping[str, tuple[str, ...]]) -> str:
    """Name a loader by the line that built it; if that is taken, by a caller's.

    ``taken``: where the loaders were built that have names.
    """
    number = sum(others[0] == built[0] for others in taken.values()) + 1
    return next((site for site in built if site not in taken), f"{built[0]}#{number}")


def _find_builders(loader: Any) -> Builders:
    """Return file:line of the code that built a loader and of its callers, and its path and line.

    The nearest comes first. Installed packages are left out, unless everything is in packages. If
    one of them builds a loader in place of another, as Accelerate does, the other's are returned.
    """
    # The next frames above are the note's and the hook's, the one after them builds the loader;
    # `stoker run` has another one between them.
    nearest = sys._getframe(3)
    if nearest.f_code.co_filename == "<stoker run>":
        nearest = nearest.f_back or nearest
    frames = []
    caller: FrameType | None = nearest
    while caller is not None:
        if not _is_installed(caller):
            frames.append(caller)
        caller = caller.f_back
    places = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames or [nearest]]
    path, line = places[0]
    sites = tuple(f"{os.path.basename(name)}:{at}" for name, at in places)
    found = sites, (os.path.abspath(path), line)
    if not hasattr(loader, "dataset"):  # a pipeline
        return found
    if not _is_installed(nearest):
        _builders[loader] = found
        return found
    same = {at for other, at in list(_builders.items()) if other.dataset is loader.dataset}
    return same.pop() if len(same) == 1 else found


def _is_installed(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return "site-packages" in name or "dist-packages" in name or name.startswith(("<", _OWN))
