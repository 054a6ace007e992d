"""Runs inside a script under analysis. Standard library only: nothing of stoker is imported.

The probe waits for ``torch.utils.data.dataloader`` and then replaces five methods of its classes:
``DataLoader.__init__`` (where a loader was built), ``DataLoader.__iter__`` and ``_get_iterator``
(start-up), ``_BaseDataLoaderIter.__next__`` (waiting; later on, replay and drains) and
``_DatasetKind.create_fetcher`` (work in the workers, only in drains). Until a loader is iterated, a
sixth hook, in ``torch.autograd``, notes training without a loader. Where only batches are counted
and timed (`stoker gate`), stoker's pipelines have two hooks, too. The probe draws no random
number of the script's, starts no thread, and holds no batch and no loader. It removes itself when
it fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_LOADER = "torch.utils.data.dataloader"
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_AUTOGRAD = "torch.autograd"
_PIPELINE = "stoker.pipeline"


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import hook: attaches the probe to PyTorch's data loaders as they are imported."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._awaited = {_LOADER, _STATEFUL, _AUTOGRAD, _PIPELINE}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._awaited:
            return None
        self._awaited.remove(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            vars(loader).pop("exec_module")
            execute(module)
            from . import backward_watch, hooks

            try:
                if fullname == _LOADER:
                    hooks.attach(module, self.folder)
                elif fullname == _STATEFUL:
                    hooks.attach_subclass(module.StatefulDataLoader)
                elif fullname == _PIPELINE:
                    hooks.attach_pipelines(module, self.folder)
                else:
                    backward_watch.watch_backward(module, self.folder)
            except Exception as error:
                hooks.note_failure(self.folder, "attach", error)

        loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def install(folder: str) -> None:
    """Attach the probe as soon as PyTorch's data loader is imported."""
    sys.meta_path.insert(0, _AfterImport(folder))
