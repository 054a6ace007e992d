"""What training frameworks and launchers do with the data: which one is at work, and whether it
gives each rank its part.

Frameworks do not say who they are. Nothing here imports one.

A framework that shards the data cannot shard a stoker pipeline, and its users rely on sharding:
that is an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from stoker.basics.resources import own_rank, rank_in_ray
from stoker.basics.warn import warn
from stoker.distributed.launchers import launched

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")


def _frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the calling frames with the names of their modules, innermost first."""
    # Frameworks do not say what they call a loader for; their frames do.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back


def reads_ahead() -> str | None:
    """Return the name of the framework whose fetcher is calling, or None.

    Lightning's fetcher reads a batch ahead of the trainer where there is no ``len()``.
    """
    for module, _ in _frames():
        if module.startswith(_LIGHTNING) and module.endswith(".loops.fetchers"):
            return "Lightning"
    return None


def overfits() -> bool:
    """Return whether Lightning is calling, and wants the same batches in every epoch."""
    for module, frame in _frames():
        if module.startswith(_LIGHTNING) and ".loops." in module:
            trainer = getattr(frame.f_locals.get("self"), "trainer", None)
            if trainer is not None:
                return bool(getattr(trainer, "overfit_batches", 0))
    return False


def _fit_loop() -> Any:
    """Return Lightning's loop over epochs of training, None where it is not calling."""
    for module, frame in _frames():
        if module.startswith(_LIGHTNING) and module.endswith(".loops.fit_loop"):
            return frame.f_locals.get("self")
    return None


def ends_epoch() -> bool:
    """True if Lightning is calling, and has ended its epoch, whether or not batches are left."""
    loop = _fit_loop()
    if loop is None or not loop.epoch_loop.batch_progress.is_last_batch:
        return False
    return not _untrained(loop)


def untrained() -> int:
    """Return how many batches Lightning has received and not finished training on."""
    loop = _fit_loop()
    return 0 if loop is None else _untrained(loop)


def _untrained(loop: Any) -> int:
    current = loop.epoch_loop.batch_progress.current
    # Private, as nothing public tells; other releases may lack it, and then nothing counts as
    # untrained.
    fetched = getattr(getattr(loop, "_data_fetcher", None), "fetched", 0)
    return int(max(0, min(current.ready, fetched) - current.processed))


def left_aside(is_for: Callable[[Any], bool]) -> Any:
    """Return, once, the state in Lightning's checkpoint of the loader that this is true for.

    None where there is none, and where Lightning loads it itself: it does in the middle of an
    epoch. Behind a whole one it would have loaders begin with their first epoch again.
    """
    loop = _fit_loop()
    # Private, as nothing public tells; other releases may lack it, and then load the state
    # themselves.
    states = getattr(loop, "_combined_loader_states_to_load", None)
    if not states or loop.restarting:
        return None
    combined = getattr(getattr(loop, "_combined_loader", None), "flattened", ())
    loaders = [each for each in combined if hasattr(each, "load_state_dict")]
    for number, loader in enumerate(loaders):
        if is_for(loader) and len(loaders) == len(states):
            saved, states[number] = states[number], None
            return saved
    return None


def distributing() -> str | None:
    """Return the name of the framework that shards the data, or None."""
    for module, _ in _frames():
        if module.startswith(_LIGHTNING):
            return "Lightning"
        if module.startswith("keras."):
            return "Keras"
    state: Any = sys.modules.get("accelerate.state")
    if state is not None and state.AcceleratorState._shared_state:
        return "Accelerate"
    return None if rank_in_ray() is None else "Ray Train"


def keeps_one_state() -> str | None:
    """Return the name of a framework that saves one rank's state for all ranks, or None."""
    for module, _ in _frames():
        if module.startswith(_LIGHTNING):
            return "Lightning"
        if module == "accelerate.checkpointing":
            return "Accelerate"
    return None


def is_calling(module_prefix: str) -> bool:
    """True if code of such a module is calling."""
    return any(module.startswith(module_prefix) for module, _ in _frames())


# What samplers, batch samplers and datasets that divide an epoch know: torch's DistributedSampler
# and its like, accelerate's shards, DALI's readers. (Hugging Face's datasets: `_distributed`.)
_KNOWN = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("num_shards", "shard_id"),
    ("world_size", "rank"),
)
_INSIDE = ("sampler", "batch_sampler", "dataset", "base_dataloader", "loader")
# Loaders that wrap loaders, down to a sampler or a dataset; a cycle of them ends there. Chosen, not
# measured.
_DEPTH = 5

_told: set[str] = set()


def warn_unsharded() -> None:
    """Warn where each of several ranks iterates over all examples of a pipeline.

    Raises ValueError where a framework distributes; so do the functions below.
    """
    shard = ".shard() gives each its part (.shard(rank=0, world=1) says that all are meant)"
    where = {
        "Lightning": "in train_dataloader(), where ranks are known",
        "Accelerate": "behind Accelerator()",
        "Ray Train": "in the training function",
        "Keras": "behind keras.distribution.initialize()",
    }
    within = {name: f"build the pipeline {at}, and {shard}" for name, at in where.items()}
    _tell("examples", shard, within)


def warn_unsharded_loader(loader: Any) -> None:
    """Warn where each of several ranks iterates over a loader that seems not to be sharded.

    A dataset may shard itself unnoticed. Ray's own and Keras's generators are sharded elsewhere, so
    under these only loaders with a sampler are refused.
    """
    if _ranks() < 2 or _divides(loader, _DEPTH):  # nothing of it is touched if there is one rank
        return
    sampler = "DataLoader(dataset, sampler=DistributedSampler(dataset)) gives each its part"
    says = "A dataset or a sampler that divides by itself says so by attributes num_replicas, rank"
    within = {
        "Lightning": f"{sampler}, made in train_dataloader(), where the ranks are known. {says}",
        "Accelerate": f"stoker.echo(accelerator.prepare(loader)) gives each its part. {says}",
    }
    if hasattr(loader, "sampler"):
        prepared = "stoker.echo(ray.train.torch.prepare_data_loader(loader)) gives each its part"
        within["Ray Train"] = f"{prepared}. {says}"
        within["Keras"] = f"{sampler}, with num_replicas= and rank=. {says}"
    _tell(
        f"batches of the {type(loader).__name__}",
        f"no DistributedSampler was found in it. {sampler}. (Where the dataset divides itself, or "
        "all are meant: warnings.filterwarnings('ignore', 'each of '))",
        within,
    )


def warn_unsharded_feed() -> None:
    """Warn where each of several ranks receives all batches of a feed."""
    advice = "have the feed serve examples (no .batch() there), and .shard() and .batch() them here"
    framework = distributing()
    _tell("batches of the feed", advice, {} if framework is None else {framework: advice})


def _ranks() -> int:
    """Return the number of ranks; without a process group, of the launcher's processes."""
    group, there = own_rank(), launched()
    if group is None:
        return 1 if there is None else there.world
    return group[1]


def _tell(what: str, advice: str, within: dict[str, str]) -> None:
    """Warn once, or raise ValueError if ``within`` has advice for the calling framework."""
    if _ranks() < 2:
        return
    told = f"each of {_ranks()} ranks iterates over all {what}: "
    # What a launcher started may have nothing to do with each other: that is no error.
    framework = None if own_rank() is None else distributing()
    if framework in within:
        raise ValueError(f"under {framework} {told}{within[framework]}")
    if what not in _told:
        _told.add(what)
        warn(told + advice)


def _divides(part: Any, depth: int) -> bool:
    """Whether some object in a loader knows its rank among several."""
    if part is None or not depth:
        return False
    with contextlib.suppress(Exception):  # properties of foreign objects may raise anything
        for count, number in _KNOWN:
            if isinstance(getattr(part, count, None), int) and hasattr(part, number):
                return True
        if getattr(part, "_distributed", None) is not None:
            return True
    inside = []
    for name in _INSIDE:
        with contextlib.suppress(Exception):
            inside.append(getattr(part, name, None))
    return any(_divides(each, depth - 1) for each in inside)
