"""What users hold: a chain of stages that owns one cursor."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from stoker import drawing, machine, randomness, state
from stoker.echoing.factor import exact_factor
from stoker.engine.crew import Tempo, is_worker
from stoker.engine.plan import compiled
from stoker.engine.run import Position, Resolved, Run, Workers
from stoker.errors import StateError
from stoker.stages.batch import Batch, Collate
from stoker.stages.device import To, torch_device
from stoker.stages.echo import Echo
from stoker.stages.map import Map, check_function, check_on
from stoker.stages.shuffle import Shuffle
from stoker.stages.source import (
    ArraySource,
    DatasetSource,
    FolderSource,
    LoaderSource,
    check_fields,
)
from stoker.stats import PoolStats, Stats

_KINDS = ("thread", "process")


class Pipeline:
    """A chain of stages over a source, and a cursor: epoch, position, statistics.

    Made by ``from_folder``, ``from_dataset``, ``from_arrays``, ``from_loader``. Each method
    returns a new pipeline with a fresh cursor and leaves this one as it is. Iterating runs
    one epoch; the next ``iter()`` is the next epoch. One thread at a time may iterate.
    """

    def __init__(self, source: Any, seed: int | None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
            raise TypeError(f"seed must be a whole number or None, not {seed!r}")
        if seed is not None and seed < 0:
            raise ValueError(f"seed must not be negative, not {seed}")
        self._source = source
        self._stages: tuple[Any, ...] = ()
        self._workers: Workers | None = None
        self._given_seed = None if seed is None else int(seed)
        self._reset(randomness.draw_seed() if seed is None else int(seed))

    def _reset(self, seed: int) -> None:
        self._seed = seed
        self._tempo = Tempo()
        self._cursor = _Cursor()

    # -- building

    def shuffle(self) -> Pipeline:
        """Draw a new order every epoch.

        A true permutation up to 2^20 examples; above, a keyed one in O(1) memory.

        Raises ValueError where there is no order to draw: after ``echo`` or ``batch``, twice,
        or on a loader.
        """
        if isinstance(self._source, LoaderSource):
            raise ValueError("a loader has an order of its own: shuffle there (shuffle=True)")
        for stage in self._stages:
            if isinstance(stage, (Echo, Batch, Shuffle)):
                raise ValueError(f".shuffle() cannot follow {stage.name}: put it first")
        return self._with(Shuffle())

    def map(self, fn: Callable[[Any], Any], *, on: str | int | None = None) -> Pipeline:
        """Apply a deterministic function to every example, or to every batch after ``batch``.

        Args:
            fn: called as ``fn(x)``; what it returns replaces ``x``. It runs in worker threads.
            on: the field it works on, by name, key or position; the whole example without.

        Raises TypeError when ``fn`` cannot be called so, LookupError when the source is known
        not to have the field.
        """
        return self._mapped(fn, on, random=False)

    def random_map(self, fn: Callable[[Any, Any], Any], *, on: str | int | None = None) -> Pipeline:
        """Apply a function that draws random numbers: after an echo, anew for every use.

        Args:
            fn: called as ``fn(x, rng)`` with a ``numpy.random.Generator``, valid during the
                call only (behind ``.to(device)``, a ``torch.Generator`` on that device). What it
                draws depends on seed, epoch, example and use, never on workers.
            on: the field it works on, by name, key or position; the whole example without.

        Raises TypeError when ``fn`` takes no ``rng``, LookupError when the source is known not
        to have the field.
        """
        return self._mapped(fn, on, random=True)

    def batch(self, n: int, *, drop_last: bool = False, collate: Collate | None = None) -> Pipeline:
        """Stack examples into batches of ``n``.

        Tuples, dicts, dataclasses and named tuples keep their form. Their arrays and numbers
        become arrays ``[n, ...]`` of the same dtype (all of them tensors, if one is a torch
        tensor); strings and bytes become lists. The arrays are the consumer's to keep or to
        write into; their memory is used again once nobody refers to it.

        Args:
            n: examples in a batch; the last one of an epoch may have fewer.
            drop_last: leave that last one out.
            collate: called with the list of examples instead; what it returns is the batch.
        """
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"a batch size is a whole number, not {n!r}")
        if n < 1:
            raise ValueError(f"a batch has at least one example, not {n}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be a function, not {type(collate).__name__}")
        if isinstance(self._source, LoaderSource):
            raise ValueError("a loader yields batches already: set its batch_size")
        for stage in self._stages:
            if isinstance(stage, Batch):
                raise ValueError(f".batch({n}) cannot follow {stage.name}: batch once")
            if isinstance(stage, Echo) and stage.pool is not None and stage.pool < n:
                raise ValueError(
                    f"{stage.name}: a pool of {stage.pool} examples is smaller than a batch of "
                    f"{n}; give it at least {stage.smallest_distinct(int(n))} to keep the uses in "
                    "a batch distinct"
                )
        return self._with(Batch(int(n), bool(drop_last), collate))

    def echo(self, factor: float, *, pool: int | str | None = None) -> Pipeline:
        """Use every item ``factor`` times: data echoing (Choi et al., arXiv 1907.05550).

        Where it stands decides what is echoed. Before ``random_map``: *example echoing before
        augmentation*; between it and ``batch``: *example echoing after augmentation*; after
        ``batch``: *batch echoing*; after ``to``: batch echoing on the device.

        Args:
            factor: mean uses of each fresh item, at least 1; fractions by error diffusion. 1
                changes nothing.
            pool: the items kept, in examples (after ``batch``: batches), or in bytes
                (``"2GiB"``). By default the smaller of 16 batches and 10 % of usable memory.

        Raises TypeError or ValueError for a factor below 1, or a pool too small for a batch.
        """
        exact = exact_factor(factor)
        size, size_bytes = _pool_size(pool)
        if exact == 1:
            return self._with()
        position = sum(isinstance(stage, Echo) for stage in self._stages)
        return self._with(Echo(exact, size, size_bytes, position))

    def workers(self, n: int, *, kind: str = "thread") -> Pipeline:
        """Set how many workers there may be; by default as many as there are usable cores.

        Args:
            n: an upper bound for threads: fewer take part where timing shows that to be
                faster; with 0 the consumer's own thread does all work. Of processes, exactly
                ``n`` (at least 1) are started every epoch.
            kind: ``"thread"``, or ``"process"`` for Python code that holds the GIL: every
                process has its own copy of the dataset, by fork or pickling, and seeds
                ``random``, NumPy and torch anew for every example.
        """
        if isinstance(self._source, LoaderSource):
            raise ValueError("a loader has workers of its own: set them there (num_workers=)")
        if kind not in _KINDS:
            raise ValueError(f"kind must be 'thread' or 'process', not {kind!r}")
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"a number of workers is a whole number, not {n!r}")
        if n < (1 if kind == "process" else 0):
            raise ValueError(f"{kind} workers cannot be {n} in number")
        twin = self._with()
        twin._workers = Workers(int(n), kind)
        return twin

    def to(self, device: Any) -> Pipeline:
        """Hand out torch tensors on a device, the next batch being copied meanwhile.

        On the CPU arrays become tensors that share their memory. Raises ImportError without
        torch, ValueError before ``batch``.
        """
        name = torch_device(device)
        batched = isinstance(self._source, LoaderSource)
        for stage in self._stages:
            if isinstance(stage, To):
                raise ValueError(f".to({name}) cannot follow {stage.name}: move once")
            batched = batched or isinstance(stage, Batch)
        if not batched:
            raise ValueError(f".to({name}) moves batches: put .batch(n) before it")
        return self._with(To(name))

    # -- the cursor

    def __iter__(self) -> PipelineIterator:
        """Start the next epoch, or go on in one that was loaded."""
        cursor = self._cursor
        live = cursor.live()
        if live is not None:
            warnings.warn(
                "a second iterator over one pipeline closes the first; give each loop a pipeline "
                "of its own (every method returns a new one)",
                stacklevel=2,
            )
            live.close()
        epoch, position = cursor.upcoming()
        plan = compiled(
            self._source,
            [s for s in self._stages if not isinstance(s, Shuffle)],
            loader=isinstance(self._source, LoaderSource),
            shuffled=any(isinstance(s, Shuffle) for s in self._stages),
        )
        workers = self._workers or Workers(machine.usable_cores(), "thread")
        run = Run(
            plan,
            self._seed,
            epoch,
            self._tempo,
            workers,
            cursor.resolved,
            position,
        )
        iterator = PipelineIterator(run, cursor)
        cursor.started(epoch, run, iterator)
        return iterator

    def __len__(self) -> int:
        """Return the number of batches (or examples, without batches) of an epoch.

        Raises TypeError when the source is a loader that has no length.
        """
        count = len(self._source)
        for stage in self._stages:
            if isinstance(stage, Echo):
                count = stage.uses(count)
            elif isinstance(stage, Batch):
                count = stage.count(count)
        return count

    @property
    def epoch(self) -> int:
        """The epoch that is being run, or was left early; after a whole epoch, the next one."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; a live iterator is closed.

        Right after ``load_state_dict``, the epoch of that state keeps its position.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)) or epoch < 0:
            raise ValueError(f"an epoch is a whole number from 0, not {epoch!r}")
        cursor = self._cursor
        if cursor.loaded and epoch == cursor.epoch:
            return  # to where a state was loaded for: that is where it goes on
        cursor.go_to(int(epoch), None)

    @property
    def seed(self) -> int:
        """The seed of shuffling, echoing and random maps."""
        return self._seed

    @property
    def classes(self) -> list[str]:
        """The class names of a folder, in the order of their labels."""
        if not isinstance(self._source, FolderSource):
            raise AttributeError("only pipelines from a folder have classes")
        return list(self._source.classes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the last batch that was yielded, ready for JSON.

        At most a byte for each item in a pool, and 4 KB. Loaded into a pipeline that is
        built alike, it makes the next iteration continue right behind that batch.

        Raises StateError in the middle of an epoch over a loader, whose batches cannot be made
        again.
        """
        cursor = self._cursor
        position = cursor.where()
        if position.yielded and isinstance(self._source, LoaderSource):
            raise StateError(
                "an epoch over a loader has no state in its middle, for its batches cannot be "
                "made again: save between epochs, or build on from_dataset(loader.dataset)"
            )
        return state.saved(self._outline(), self._seed, cursor.epoch, position, cursor.resolved)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go to a saved state; the next ``iter()`` continues there. Closes a live iterator.

        Raises StateError when the state belongs to another pipeline, seed or version.
        """
        loaded = state.read(saved, self._outline(), self._given_seed)
        self._seed = loaded.seed
        self._cursor.go_to(loaded.epoch, loaded.position)
        self._cursor.resolved = loaded.resolved

    def stats(self) -> Stats:
        """Return statistics of the epoch being run, or else of the last one."""
        return self._cursor.stats(self._stages)

    def __str__(self) -> str:
        return drawing.chain(
            self._source,
            self._stages,
            seed=self._seed,
            drawn=self._given_seed is None,
            workers=self._workers,
            resolved=self._cursor.resolved,
        )

    def __repr__(self) -> str:
        names = [self._source.name, *(stage.name for stage in self._stages)]
        return f"<stoker.Pipeline {'.'.join(names)} seed={self._seed}>"

    # -- within

    def _with(self, *stages: Any) -> Pipeline:
        twin = object.__new__(type(self))
        twin._source = self._source
        twin._stages = (*self._stages, *stages)
        twin._workers = self._workers
        twin._given_seed = self._given_seed
        twin._reset(self._seed)
        return twin

    def _mapped(self, fn: Any, on: Any, *, random: bool) -> Pipeline:
        check_function(fn, random=random)
        check_on(on)
        if all(isinstance(s, Shuffle) or getattr(s, "on", None) is not None for s in self._stages):
            check_fields(self._source, on)
        position = sum(isinstance(s, Map) and s.random for s in self._stages)
        return self._with(Map(fn, on, random, position))

    def _outline(self) -> list[str]:
        """Return what must be alike for a state to fit."""
        known = not isinstance(self._source, LoaderSource)
        lines = [f"{type(self._source).__name__} of {len(self._source)}" if known else "loader"]
        for stage in self._stages:
            if isinstance(stage, Map):
                field = "" if stage.on is None else f" on {stage.on!r}"
                lines.append(("random_map" if stage.random else "map") + field)
            elif isinstance(stage, Batch):
                lines.append(f"batch({stage.n}, drop_last={stage.drop_last})")
            elif isinstance(stage, Echo):
                size = stage.pool if stage.pool is not None else stage.pool_bytes
                lines.append(f"echo({stage.factor}, pool={size})")
            elif isinstance(stage, Shuffle):
                lines.append("shuffle")
        return lines


class PipelineIterator(Iterator[Any]):
    """One epoch's batches. ``close()`` ends it early; it also works in ``with``.

    Dropping the last reference closes it too. An error or Ctrl-C within ``next()`` closes it;
    only what a foreign loader raises leaves it as it is, for the loader may go on.
    """

    def __init__(self, run: Run, cursor: _Cursor) -> None:
        self._run = run
        self._finish = weakref.finalize(self, cursor.ended, run)

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Any:
        run = self._run
        if run.closed:
            raise StopIteration
        try:
            return run.next()
        except StopIteration:
            run.complete = True
            self.close()
            raise
        except BaseException as error:
            if error is not run.loader_error():
                self.close()
            raise

    def __len__(self) -> int:
        """Return the number of outputs that are left; TypeError where it is not known."""
        if self._run.total is None:
            raise TypeError("the number of batches is not known before the loader ends")
        return self._run.total - self._run.yielded

    def close(self) -> None:
        """End this iteration: its threads and processes are gone when this returns."""
        self._finish()

    def __enter__(self) -> PipelineIterator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Cursor:
    """Where a pipeline is. Shared with its iterators, which outlive it or not."""

    def __init__(self) -> None:
        self.epoch = 0
        self.position: Position | None = None  # in self.epoch, where to begin or where it ended
        self.resolved: dict[int, Resolved] = {}
        self._fresh_start = True  # whether the next iter() begins here rather than behind
        self._run: Run | None = None
        self._iterator: weakref.ref[PipelineIterator] | None = None

    def live(self) -> PipelineIterator | None:
        iterator = self._iterator() if self._iterator is not None else None
        return None if iterator is None or self._run is None or self._run.closed else iterator

    def upcoming(self) -> tuple[int, Position]:
        """Return the epoch that ``iter()`` starts, and where in it."""
        if self._fresh_start:
            return self.epoch, self.position or Position()
        return self.epoch + 1, Position()

    @property
    def loaded(self) -> bool:
        """Whether the next ``iter()`` goes on in the middle of an epoch."""
        return self._fresh_start and self.position is not None

    def started(self, epoch: int, run: Run, iterator: PipelineIterator) -> None:
        self.epoch, self.position, self._fresh_start = epoch, None, False
        self._run = run
        self._iterator = weakref.ref(iterator)

    def ended(self, run: Run) -> None:
        """Close a run and keep where it was."""
        if run.closed:
            return
        if self._run is run:  # first of all, should Ctrl-C come in between
            if run.complete:
                self.epoch, self.position, self._fresh_start = self.epoch + 1, None, True
            else:
                self.position = run.position()
        if is_worker():  # the collector found an abandoned iterator in there
            threading.Thread(target=run.close, name="stoker-closing", daemon=True).start()
        else:
            run.close()

    def go_to(self, epoch: int, position: Position | None) -> None:
        live = self.live()
        if live is not None:
            live.close()
        self.epoch, self.position, self._fresh_start = epoch, position, True

    def where(self) -> Position:
        """Return the position of the last output that was yielded."""
        if self._run is not None and not self._run.closed:
            return self._run.position()
        return self.position or Position()

    def stats(self, stages: Sequence[Any]) -> Stats:
        if self._run is None:
            return Stats(
                self.epoch, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, (), 0, 0, 0, 0,
                _pools(stages, self.resolved, {}),
            )  # fmt: skip
        return self._run.stats(_pools(stages, self.resolved, self._run.held()))


def _pools(
    stages: Sequence[Any], resolved: dict[int, Resolved], held: dict[int, int]
) -> tuple[PoolStats, ...]:
    pools = []
    for stage in stages:
        if isinstance(stage, Echo):
            known = resolved.get(stage.position, Resolved(stage.pool or 0))
            pools.append(
                PoolStats(
                    stage.name,
                    held.get(stage.position, 0),
                    known.size,
                    known.size * known.item_bytes,
                )
            )
    return tuple(pools)


def _pool_size(pool: Any) -> tuple[int | None, int | None]:
    if pool is None:
        return None, None
    if isinstance(pool, str):
        size = machine.parse_bytes(pool)
        if not size:
            raise ValueError(f"a pool of {pool!r} holds nothing")
        return None, size
    if isinstance(pool, bool) or not isinstance(pool, (int, np.integer)):
        raise TypeError(f"pool= takes a number of items or a size such as '2GiB', not {pool!r}")
    if pool < 1:
        raise ValueError(f"a pool holds at least one item, not {pool}")
    return int(pool), None


def from_folder(path: str | os.PathLike[str], *, seed: int | None = None) -> Pipeline:
    """Read image files from ``path/CLASS/...``: examples ``(image=bytes, label=int)``.

    Labels number the sorted class folders; ``pipeline.classes`` has their names.

    Raises FileNotFoundError or ValueError, saying what was looked for, when there is nothing
    to read.
    """
    return Pipeline(FolderSource(path), seed)


def from_dataset(dataset: Any, *, seed: int | None = None) -> Pipeline:
    """Read any object with ``__len__`` and ``__getitem__`` (integers from 0).

    ``__getitems__(indices)`` is used where it exists. torch and Hugging Face datasets fit.
    Threads call the dataset concurrently, and randomness inside it is then not reproducible
    (use ``random_map``, or process workers). Raises TypeError when a method is missing.
    """
    return Pipeline(DatasetSource(dataset), seed)


def from_arrays(*arrays: Any, seed: int | None = None) -> Pipeline:
    """Read rows of NumPy arrays or memory maps of one length.

    An example is a tuple of rows, or a bare row of a single array. Batches are gathered
    straight from the arrays, which are never written to.
    """
    return Pipeline(ArraySource(arrays), seed)


def from_loader(loader: Iterable[Any], *, seed: int | None = None) -> Pipeline:
    """Take ready batches from any object that can be iterated anew every epoch.

    A torch ``DataLoader`` above all: its workers, sampler, pinning and random draws stay as
    its owner set them. It is iterated in the consumer's thread, and what it raises comes
    through unchanged. Raises TypeError for an iterator, which would be used up after one epoch.
    """
    return Pipeline(LoaderSource(loader), seed)


def echo(
    loader: Iterable[Any], factor: float, *, pool: int | str | None = None, seed: int | None = None
) -> Pipeline:
    """Echo the batches of a loader that you keep: ``from_loader(loader).echo(factor)``.

    Batch echoing: each batch is used ``factor`` times, from a pool of ``pool`` batches or
    bytes. Earlier uses are copies; what is done to a batch reaches no other use.
    """
    return from_loader(loader, seed=seed).echo(factor, pool=pool)
