"""Loads the probe in a Python process that `stoker analyze` started, or a child of one.

This folder stands first on PYTHONPATH there, so that launchers, ranks and spawned workers find
it. It takes itself out of ``sys.path`` and runs the ``sitecustomize`` that it hides, if any.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _give_way() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        module = importlib.util.module_from_spec(hidden)
        # Python imports one sitecustomize: this one hides another, which runs now in its place.
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)


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
        probe.install(folder)
    except Exception as error:
        with open(os.path.join(folder, f"failed-{os.getpid()}"), "w") as file:
            file.write(f"{type(error).__name__}: {error}")


if folder := os.environ.get("STOKER_PROBE"):
    try:
        _load_probe(folder)
    finally:
        _give_way()
