"""Prepares PyTorch's data loader in a Python process that `stoker run` started, or a child of one.

This folder stands first on PYTHONPATH there, so that launchers and ranks find it. It takes itself
out of ``sys.path`` and runs the ``sitecustomize`` that it hides, if any. stoker is imported when
the first loader is built: a process that builds none does not pay for it.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# Modules of loaders, their classes, and the functions that put hooks on them to change them.
_LOADERS = {
    "torch.utils.data.dataloader": ("DataLoader", "attach"),
    "torchdata.stateful_dataloader.stateful_dataloader": ("StatefulDataLoader", "attach_stateful"),
}


class _AfterLoaders(importlib.abc.MetaPathFinder):
    """An import hook: prepares data loaders as they are imported."""

    def __init__(self) -> None:
        self._awaited = dict(_LOADERS)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._awaited:
            return None
        names = self._awaited.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                vars(loader).pop("exec_module")
                execute(module)
                _prepare(getattr(module, names[0]), names[1])

            loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _prepare(loader_class: Any, attach: str) -> None:
    build = loader_class.__init__
    prepared: list[Any] = []

    def prepare() -> Any:
        # Lightning wraps ``__init__`` while it has loaders built, and puts this one back then.
        now, loader_class.__init__ = loader_class.__init__, build
        try:
            getattr(importlib.import_module("stoker.running.hooks"), attach)(loader_class)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            print(f"stoker run: all loaders are left as they are: {problem}", file=sys.stderr)
        hooked, loader_class.__init__ = loader_class.__init__, now
        return hooked

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # PyTorch is complete by now; while its own modules are imported, stoker cannot be.
        if not prepared:
            prepared.append(prepare())
        prepared[0](self, *args, **kwargs)

    # The hook looks for the line that builds the loader, and passes over code of no file.
    __init__.__code__ = __init__.__code__.replace(co_filename="<stoker run>")
    loader_class.__init__ = functools.update_wrapper(__init__, build)


def _give_way() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        module = importlib.util.module_from_spec(hidden)
        # Python imports one sitecustomize: this one hides another, which runs now in its place.
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)


if os.environ.get("STOKER_RUN_PLAN") and os.environ.get("STOKER_RUN") != "0":
    sys.meta_path.insert(0, _AfterLoaders())
_give_way()
