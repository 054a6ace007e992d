"""Prepares a Python process that `stoker analyze`, `gate` or `run` started, or a child of one.

This folder stands first on PYTHONPATH there, so that launchers, ranks and spawned workers find
it. It takes itself out of ``sys.path`` and runs the ``sitecustomize`` that it hides, if any. An
analysis loads its probe here; for a run, stoker is imported when the first loader is built: a
process that builds none does not pay for it.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import hook: calls a function with each of some modules, once it is imported."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        call = self._calls.pop(fullname, None)
        if call is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                call(module)

            loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _load_probe(folder: str) -> None:
    # By its path and under a name of its own: importing stoker here would bring NumPy along, in
    # every process that the script starts.
    here = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "probe")
    spec = importlib.util.spec_from_file_location(
        "_stoker_probe", os.path.join(here, "__init__.py"), submodule_search_locations=[here]
    )
    if spec is None or spec.loader is None:
        return
    probe = importlib.util.module_from_spec(spec)
    sys.modules["_stoker_probe"] = probe
    try:
        spec.loader.exec_module(probe)
        sys.meta_path.insert(0, _AfterImport(probe.list_hooks(folder)))
    except Exception as error:
        with open(os.path.join(folder, f"failed-{os.getpid()}"), "w") as file:
            file.write(f"{type(error).__name__}: {error}")


def _prepare_run(module: ModuleType) -> None:
    """Have the first loader that is built put the hooks of a run on its class."""
    loader_class: Any = module.DataLoader
    build = loader_class.__init__
    prepared: list[Any] = []

    def prepare() -> Any:
        # Lightning wraps ``__init__`` while it has loaders built, and puts this one back then.
        now, loader_class.__init__ = loader_class.__init__, build
        try:
            importlib.import_module("stoker.running.hooks").attach(loader_class)
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


try:
    if folder := os.environ.get("STOKER_PROBE"):
        _load_probe(folder)
    if os.environ.get("STOKER_RUN_PLAN") and os.environ.get("STOKER_RUN") != "0":
        sys.meta_path.insert(0, _AfterImport({"torch.utils.data.dataloader": _prepare_run}))
finally:
    _give_way()
