"""Runs inside a script under analysis. Standard library only: nothing of stoker is imported.

The probe waits for ``torch.utils.data.dataloader`` and then replaces five methods of its classes:
``DataLoader.__init__`` (where a loader was built), ``DataLoader.__iter__`` and ``_get_iterator``
(start-up), ``_BaseDataLoaderIter.__next__`` (waiting; later on, replay and drains) and
``_DatasetKind.create_fetcher`` (work in the workers, only in drains). Others time the parts of a
step (``step_parts.py``). stoker's pipelines have two hooks, too. The probe draws
no random number of the script's, starts no thread while the script runs as it is, and holds no
batch and no loader. It removes itself when it fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from . import step_parts

_HOOKS = {
    "torch.utils.data.dataloader": "attach",
    "torchdata.stateful_dataloader.stateful_dataloader": "attach_stateful",
    "stoker.pipeline": "attach_pipelines",
}


def list_hooks(folder: str) -> dict[str, Callable[[ModuleType], None]]:
    """Return the functions that attach the probe, by the module that each is to be called with."""
    hooks: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(
        step_parts.WATCHES, functools.partial(_watch_step, folder)
    )
    for name, hook in _HOOKS.items():
        hooks[name] = functools.partial(_attach, hook, folder)
    return hooks


def _attach(hook: str, folder: str, module: ModuleType) -> None:
    from . import hooks  # not before: most processes have no loader

    try:
        getattr(hooks, hook)(module, folder)
    except Exception as error:
        hooks.note_failure(folder, "attach", error)


def _watch_step(folder: str, module: ModuleType) -> None:
    try:
        step_parts.WATCHES[module.__name__](module)
    except Exception as error:
        from . import hooks

        hooks.note_failure(folder, "attach", error)
