"""What changes of a loader, and why not: decided at its first iteration."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import weakref
from multiprocessing import util
from typing import Any

import msgspec
import psutil

from stoker.analysis.model.changes import WORTH
from stoker.analysis.probe.state import tell_changes, tell_moves
from stoker.basics.resources import usable_cores
from stoker.frameworks.rank import process_group
from stoker.running.examples.kept_examples import is_cached, plan_bytes
from stoker.running.examples.trial import ExampleTrial, try_examples
from stoker.running.plan import RunPlan

# Packages whose samplers draw at the start of an epoch, or from generators of their own: what they
# give does not depend on how far ahead they are read. A user's own sampler may draw in between.
_KNOWN_SAMPLERS = {
    "torch", "accelerate", "transformers", "pytorch_lightning", "lightning", "lightning_fabric",
    "timm", "torchdata", "builtins", "stoker",
}  # fmt: skip
# PyTorch's iterators with workers of this process.
_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


class LoaderSettings(msgspec.Struct, frozen=True):
    """How a loader works: PyTorch's options of these names."""

    workers: int
    prefetch: int | None
    persistent: bool
    cache_bytes: int = 0
    """The size of a store for the dataset's examples; 0 if there is none."""

    @property
    def lead(self) -> int:
        """Batches whose indices are drawn before the first one is handed over."""
        return self.workers * (self.prefetch or 0)


class LoaderChoice(msgspec.Struct, frozen=True):
    """The settings of a loader from now on."""

    own: LoaderSettings
    """As the script has them."""
    new: LoaderSettings
    same: bool = True
    """True if batches are the same as with the script's own settings."""
    twice: bool = True
    """True if a batch may be made twice: no generator moves at that. Else the number of workers
    stays, and so do their seeds."""
    why: str = ""
    """Why something was not applied."""
    identity: str = ""
    """Of the examples in a store."""

    opens: bool = False
    """True if reading an example leaves a file open."""

    @property
    def is_changed(self) -> bool:
        return self.new != self.own

    @property
    def is_comparable(self) -> bool:
        """True if the script's own settings can be used for a while, too.

        Not if the script's process would read, and open a file that later workers would share.
        """
        return self.twice and not (self.opens and self.own.workers == 0)


class LoaderView:
    """A loader, with some attributes replaced, as PyTorch's iterators read it."""

    def __init__(self, loader: Any, changed: dict[str, Any] | None = None) -> None:
        self._loader = loader
        vars(self).update(changed or {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def start_workers(module: Any, loader: LoaderView) -> Any:
    """Return PyTorch's iterator with workers, which end when this process does."""
    if not _OPEN:
        # PyTorch's own function at exit, which runs after this one, has them killed; and children
        # of multiprocessing call none.
        atexit.register(_end_workers)
        util.Finalize(None, _end_workers, exitpriority=0)
    found = module._MultiProcessingDataLoaderIter(loader)
    _OPEN.add(found)
    return found


def _end_workers() -> None:
    """Let workers end by themselves: each removes its temporary folder."""
    for batches in [*_OPEN]:
        batches._shutdown_workers()


def _leave_workers() -> None:
    """Have a forked process, which ends its copies of iterators, leave its parent's workers."""
    for batches in _OPEN:
        batches._shutdown = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_workers)


def choose(
    loader: Any, module: Any, plan: RunPlan, site: str, *, not_kept: str = ""
) -> LoaderChoice:
    """Choose a loader's settings. Another process reads some of its examples.

    ``not_kept``: why its examples get no cache.
    """
    own = LoaderSettings(loader.num_workers, loader.prefetch_factor, loader.persistent_workers)
    refused = _find_obstacle(loader, module, own)
    if refused:
        return LoaderChoice(own, own, why=refused)
    is_analyzed = site == plan.loader
    new, why = _want(own, plan, is_analyzed=is_analyzed)
    if new == own and not plan.cache:
        return LoaderChoice(own, own, why=why or "the report advises no other settings")
    if is_cached(loader.dataset):
        not_kept = "its dataset is cached already"
    elif is_analyzed and plan.changes:
        not_kept = not_kept or tell_changes(plan.changes)
    elif is_analyzed and plan.kept_gain is not None and plan.kept_gain < WORTH:
        not_kept = not_kept or f"{plan.kept_gain:.2f} times as fast with a cache, by the report"
    keeps = plan.cache and not not_kept
    create = module._DatasetKind.create_fetcher
    sends = own.workers == 0 and new.workers > 0
    trial = try_examples(loader, create, sends=sends, keeps=keeps)
    if trial.problem:
        return LoaderChoice(own, own, why=f"its examples cannot be tried: {trial.problem}")
    if trial.moves:
        why = f"{tell_moves(trial.moves)}, and would change otherwise"
        return LoaderChoice(own, own, why=why)
    found = _fit(own, new, plan, trial, why)
    if not plan.cache:
        return found
    refused = not_kept or trial.not_kept
    size = 0 if refused else plan_bytes(trial.example_bytes, len(loader.dataset))
    if not size:
        refused = refused or "there is no memory for it"
        reasons = (found.why, f"not cached: {refused}")
        return msgspec.structs.replace(found, why="; ".join(filter(None, reasons)))
    if size >= trial.example_bytes * len(loader.dataset):  # from memory, its own workers are enough
        new, why = _want(own, msgspec.structs.replace(plan, workers=None), is_analyzed=is_analyzed)
        found = _fit(own, new, plan, trial, why)
    kept = msgspec.structs.replace(found.new, cache_bytes=size)
    return msgspec.structs.replace(found, new=kept, identity=f"{plan.run} {trial.identity}")


def _fit(
    own: LoaderSettings, new: LoaderSettings, plan: RunPlan, trial: ExampleTrial, why: str
) -> LoaderChoice:
    """Return what is left of wanted settings after a look at the examples."""
    if not trial.random:
        return LoaderChoice(own, new, why=why, opens=trial.opens)
    if not plan.exact and new != own:
        return LoaderChoice(own, new, same=False, why=why, opens=trial.opens)
    if new != own:
        why = "examples are random, and would be drawn otherwise, which --exact refuses"
    return LoaderChoice(own, own, twice=False, why=why)


def _find_obstacle(loader: Any, module: Any, own: LoaderSettings) -> str:
    """Return why a loader cannot be changed; empty if it can."""
    if loader._dataset_kind != module._DatasetKind.Map:
        return "a stream: more workers would repeat its examples"
    if isinstance(loader.dataset, (module.IterDataPipe, module.MapDataPipe)):
        return "its dataset is a DataPipe, which has random draws of its own"
    if type(loader)._get_iterator is not module.DataLoader._get_iterator:
        return f"{type(loader).__name__} makes iterators of its own"
    if not getattr(loader, "in_order", True):
        return "in_order=False: its order is random"
    sampler = loader._index_sampler
    try:
        len(sampler)
    except TypeError:
        return (
            f"its sampler {type(sampler).__name__} may go on into the next epoch: it has no len()"
        )
    unknown = _find_unknown_sampler(sampler)
    if unknown:
        return f"its sampler {unknown} may depend on how far ahead it is read"
    return ""


def acts_at_end(sampler: Any) -> bool:
    """True if reading a sampler to its end may move a generator, or an epoch that it counts."""
    parts = _list_samplers(sampler)
    return any(
        type(part).__module__.partition(".")[0] not in ("torch", "builtins")
        or getattr(part, "generator", None) is not None
        for part in parts
    )


def _list_samplers(sampler: Any) -> list[Any]:
    """Return a sampler and those that it wraps."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is one for one in found):
        found.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
    return found


def _find_unknown_sampler(sampler: Any) -> str:
    """Return the name of a sampler whose draws are unknown; empty if there is none."""
    for part in _list_samplers(sampler):
        if type(part).__module__.partition(".")[0] not in _KNOWN_SAMPLERS:
            return type(part).__name__
        # With a generator of the script's, these draw from it during an epoch.
        if getattr(part, "generator", None) is not None and (
            getattr(part, "replacement", False) is True
            or getattr(part, "_num_samples", None) is not None
        ):
            return type(part).__name__
    return ""


def _want(own: LoaderSettings, plan: RunPlan, *, is_analyzed: bool) -> tuple[LoaderSettings, str]:
    """Return the settings that a plan wants, and why one of them is not applied."""
    workers, why = own.workers, ""
    if plan.workers is not None and (is_analyzed or plan.workers > own.workers):
        most = _most_workers(plan)
        workers = min(plan.workers, most) if plan.workers > own.workers else plan.workers
        workers = max(workers, own.workers) if plan.workers > own.workers else workers
        if workers < plan.workers:
            why = f"{plan.workers} workers are more than this process's share of the cores"
    # With ``allow_none``: to ask without it would choose, and the script may choose later.
    method = multiprocessing.get_start_method(allow_none=True)
    method = method or multiprocessing.get_all_start_methods()[0]
    if own.workers == 0 < workers and method != "fork":
        why, workers = f"workers would be started by {method!r}, and import the script again", 0
    if workers == 0:
        return LoaderSettings(0, None, False), why
    persistent = own.persistent or workers > own.workers or (is_analyzed and plan.persistent)
    if is_analyzed and plan.changes and persistent and not own.persistent:
        persistent = False
        why = "; ".join(filter(None, (why, f"not persistent: {tell_changes(plan.changes)}")))
    return LoaderSettings(workers, own.prefetch or 2, persistent), why


def _most_workers(plan: RunPlan) -> int:
    """Return the most workers of this process, where each trainer on the host has as many."""
    assert plan.workers is not None
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    own = int(local) if local.isdigit() else None
    _, ranks = process_group() or (0, 1)
    # On this host, as far as this process can tell.
    trainers = max(1, ranks if own is None else own, plan.trainers, _count_siblings())
    if plan.workers > plan.cores:  # measured to help: preparing mostly waits
        return max(1, plan.workers * plan.trainers // trainers)
    return max(1, usable_cores() * (1 if own is None else own) // trainers)


def _count_siblings() -> int:
    """Return how many processes the parent has started as it started this one."""
    if multiprocessing.parent_process() is None:
        return 1
    try:
        found = psutil.Process(os.getppid()).children()
        return sum(_is_trainer(process) for process in found)
    except psutil.Error:
        return 1


def _is_trainer(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "resource_tracker" not in words and "forkserver" not in words
