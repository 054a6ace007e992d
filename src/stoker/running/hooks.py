"""The hooks on PyTorch's data loader: where one is built, and what its iteration does."""

from __future__ import annotations

import multiprocessing
import os
import sys
import weakref
from multiprocessing import util
from typing import Any

from stoker.analysis.model.report import REDRAWN, SAME
from stoker.analysis.probe.builders import hook_loaders, name_loader
from stoker.analysis.probe.step_parts import watch_backward
from stoker.basics.fingerprint import content_digest
from stoker.basics.resources import format_bytes
from stoker.basics.warn import say
from stoker.frameworks.rank import process_group
from stoker.running.batches import ChangedLoader
from stoker.running.examples.kept_examples import KeptExamples
from stoker.running.loaders import LoaderChoice, choose
from stoker.running.outcome import SpeedTurns
from stoker.running.plan import read_plan

# So many datasets at one place, each for one epoch, and the next one will be another, too: a cache
# or a comparison would only take time. Chosen, not measured.
_OTHERS = 2


def attach(loader_class: Any) -> None:
    """Put the hooks on PyTorch's ``DataLoader``."""
    module = sys.modules[loader_class.__module__]
    process = _RunningProcess(module, sys.modules["torch"])

    def adopt(loader: Any, start: Any) -> Any:
        if module.get_worker_info() is not None or multiprocessing.current_process().daemon:
            return start(loader)  # such processes cannot start others
        changed = process.adopt(loader)
        return start(loader) if changed is None else changed.iterate(loader)

    hook_loaders(loader_class, adopt)


class _RunningProcess:
    """The loaders that a process iterates."""

    def __init__(self, module: Any, torch: Any) -> None:
        self._module, self._torch = module, torch
        watch_backward(torch.autograd)
        self._plan = read_plan()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._choices: dict[Any, tuple[LoaderChoice, SpeedTurns]] = {}
        self._stores: dict[str, KeptExamples] = {}
        self._times: dict[Any, int] = {}
        self._told: dict[str, str] = {}  # of each loader, what was said of it last
        self._names: dict[str, tuple[tuple[str, ...], weakref.ref[Any]]] = {}
        self._sites: set[str] = set()

    def adopt(self, loader: Any) -> ChangedLoader | None:
        """Return a loader with other settings, which are chosen at its first iteration.

        None if it is left as it is.
        """
        if os.getpid() != self._pid:
            self._begin()  # a fork leaves its parent's workers behind
        if loader in self._known:
            found: ChangedLoader | None = self._known[loader]
            return found
        site = self._name(loader)
        try:
            found = self._choose(loader, site)
        except Exception as error:
            self._say(f"{site}: left as it is: {type(error).__name__}: {error}")
            found = None
        self._known[loader] = found
        return found

    def _tell(self, site: str, text: str) -> None:
        """Say what is done with a loader, unless that was said last: it may be built anew."""
        if self._told.get(site) != text:
            self._told[site] = text
            self._say(f"{site}: {text}")

    def _name(self, loader: Any) -> str:
        """Name a loader as the analysis does; one that is built anew for every epoch stays one."""
        built: tuple[str, ...] = vars(loader).get("_stoker_built", ("somewhere",))
        gone = (name for name, (of, last) in self._names.items() if of == built and last() is None)
        taken = {name: of for name, (of, _) in self._names.items()}
        name = next(gone, None) or name_loader(built, taken)
        self._names[name] = built, weakref.ref(loader)
        return name

    def _choose(self, loader: Any, site: str) -> ChangedLoader | None:
        # A loader that is built anew for every epoch is tried once.
        examples = content_digest(loader.dataset), content_digest(loader.collate_fn)
        kind = site, loader.num_workers, loader.batch_size, examples
        if not self._sites:
            # Not atexit, which children of multiprocessing leave out.
            util.Finalize(None, self._end, exitpriority=0)
        self._sites.add(site)
        times = self._times[kind] = self._times.get(kind, 0) + 1

        def tell(text: str) -> None:
            self._say(f"{site}: {text}")

        differs = self._differs_each_time(site)
        if kind not in self._choices:
            why = "its dataset is another one each time" if differs else ""
            choice = choose(loader, self._module, self._plan, site, not_kept=why)
            is_analyzed = site == self._plan.loader
            told: dict[str, Any] = {}
            if is_analyzed:
                told = {
                    "batches_per_s": (self._plan.examples_per_s or 0.0) / self._plan.batch_size,
                    "predicted": self._plan.predict(cached=bool(choice.new.cache_bytes)),
                    "report": self._plan.report,
                }
            self._choices[kind] = choice, SpeedTurns(choice, tell, **told)
            self._tell(site, describe(choice))
        choice, turns = self._choices[kind]
        if not choice.is_changed:
            return None
        return ChangedLoader(
            self._module,
            self._torch,
            choice,
            tell,
            stores=self._stores,
            # Once, and once more with examples from the cache.
            compares=not differs
            and times <= 1 + bool(choice.new.cache_bytes)
            and turns.settings == choice.new,
            turns=turns,
        )

    def _differs_each_time(self, site: str) -> bool:
        """True if the loaders built in a place had other data each time, for an epoch each."""
        begun = [
            turns.begun
            for (place, *_), (choice, turns) in self._choices.items()
            if place == site and choice.is_changed  # others are not counted
        ]
        return len(begun) >= _OTHERS and max(begun[-_OTHERS:]) < 2

    def _end(self) -> None:
        """Tell what is left to tell when this process ends."""
        for _, turns in self._choices.values():
            turns.end()
        if self._plan.loader not in self._sites:
            self._say(
                f"the loader of the report, {self._plan.loader}, was not iterated in this process"
            )

    def _say(self, text: str) -> None:
        rank, ranks = _read_rank()
        who = f" [rank {rank}]" if ranks > 1 else ""
        say(f"stoker run{who}: {text}")


def describe(choice: LoaderChoice) -> str:
    """Return what was applied to a loader, or why nothing was."""
    own, new = choice.own, choice.new
    if not choice.is_changed:
        return f"left as it is: {choice.why}"
    parts = []
    if new.workers != own.workers:
        parts.append(f"num_workers {own.workers} -> {new.workers}")
    if new.persistent and not own.persistent:
        parts.append("persistent")
    if new.cache_bytes:
        parts.append(f"cached ({format_bytes(new.cache_bytes)})")
    text = f"{', '.join(parts)}; {SAME if choice.same else REDRAWN}"
    return text + (f" ({choice.why})" if choice.why else "")


def _read_rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdigit() and ranks.isdigit():
        return int(rank), int(ranks)
    return process_group() or (0, 1)
