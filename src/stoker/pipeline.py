"""What users hold: a chain of stages that owns one cursor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stoker import describe, machine, rng, state
from stoker.buffers import Recycler
from stoker.caution import warn
from stoker.checks import is_whole_number
from stoker.cursor import Cursor, PipelineIterator, reads_ahead
from stoker.engine.epoch import Run
from stoker.engine.pool.make import Workers
from stoker.engine.pool.threads import Autotuner
from stoker.engine.position import Position
from stoker.engine.rank_sync import ranks
from stoker.engine.work import compiled, share_of
from stoker.errors import StateError
from stoker.fitting import Fit
from stoker.machine import process_group
from stoker.schedule.adaptive import MOST_FACTOR
from stoker.schedule.factor import exact_factor
from stoker.schedule.record import read as read_record
from stoker.schedule.record import written
from stoker.sources.source import (
    check_fields,
)
from stoker.sources.stream import DEFAULT_BUFFER, IterableSource, LoaderSource, Resumable
from stoker.sources.unsharded import warn_unsharded
from stoker.stages.batch import Batch, Collate
from stoker.stages.cache import CacheStage, say_what_cannot_help
from stoker.stages.echo import DEFAULT_MAX_FACTOR, Echo
from stoker.stages.filter import Filter
from stoker.stages.map import Map, check_function, check_on
from stoker.stages.shard import Shard, check_assumed, shard_of
from stoker.stages.shuffle import Shuffle
from stoker.stages.skip import RAISE, Budget, OnError, budget_of
from stoker.stages.to import To, torch_device
from stoker.stats import Clock, Stats

_KINDS = ("thread", "process")


class Pipeline:
    """A chain of stages over a source, and a cursor: epoch, position, statistics.

    Made by ``from_folder``, ``from_dataset``, ``from_arrays``, ``from_loader``. Each method
    returns a new pipeline with a fresh cursor and leaves this one as it is. Iterating runs
    one epoch; the next ``iter()`` is the next epoch. One thread at a time may iterate.
    """

    def __init__(self, source: Any, seed: int | None, on_error: OnError = "raise") -> None:
        if seed is not None and not is_whole_number(seed):
            raise TypeError(f"seed must be a whole number or None, not {seed!r}")
        if seed is not None and seed < 0:
            raise ValueError(f"seed must not be negative, not {seed}")
        self._source = source
        self._budget = budget_of(on_error)
        self._stages: tuple[Any, ...] = ()
        self._workers: Workers | None = None
        self._steps: int | None = None
        self._recycler: Recycler | None = None
        self._given_seed = None if seed is None else int(seed)
        self._reset(rng.draw_seed() if seed is None else int(seed))

    def _reset(self, seed: int) -> None:
        self._seed = seed
        self._autotuner = Autotuner()
        self._cursor = Cursor()

    # -- building

    def shuffle(self, *, buffer: int | None = None) -> Pipeline:
        """Draw a new order every epoch.

        A true permutation up to 2^20 examples; above, a keyed one in O(1) memory. Streams are
        shuffled through a buffer: an example is drawn from it, and the next one takes its place.

        Args:
            buffer: for streams, how many examples it holds (they stay in memory); by default
                1,000.

        Raises ValueError where there is no order to draw: after ``echo`` or ``batch``, twice,
        or on a loader.
        """
        if isinstance(self._source, LoaderSource):
            raise ValueError("a loader has an order of its own: shuffle there (shuffle=True)")
        for stage in self._stages:
            if isinstance(stage, (Echo, Batch, Shuffle)):
                raise ValueError(f".shuffle() cannot follow {stage.name}: put it first")
        if not isinstance(self._source, IterableSource):
            if buffer is not None:
                raise ValueError(
                    "a buffer is for streams; this source is shuffled as a whole: .shuffle()"
                )
            return self._with(Shuffle())
        if buffer is None:
            buffer = DEFAULT_BUFFER
        if not is_whole_number(buffer) or buffer < 2:
            raise ValueError(f"a shuffle buffer holds at least two examples, not {buffer!r}")
        return self._with(Shuffle(int(buffer)))

    def shard(
        self, *, rank: int | None = None, world: int | None = None, uneven: bool = False
    ) -> Pipeline:
        """Leave this process its part of every epoch: disjoint parts of equal length.

        Of ``n`` examples each rank gets ``n // world``; which ones are left over changes with the
        epoch. Before ``shuffle`` a rank's part is fixed (for a cache on each host); after it,
        parts are drawn anew every epoch. All ranks need the same seed. Of a stream, rank ``r``
        takes every ``world``-th example.

        Args:
            rank, world: this process among so many; by default those of ``torch.distributed``,
                if that is initialised. If not, this is the only process.
            uneven: keep all examples, so that ranks may differ by one: for evaluation.

        Raises ValueError on a loader, which is sharded by its sampler, and where ``WORLD_SIZE`` in
        the environment tells of other processes, but there is no process group; ``iter()`` where
        it was initialised after this.
        """
        if isinstance(self._source, LoaderSource):
            raise ValueError(
                "a loader is sharded by its sampler (DistributedSampler): set it there"
            )
        for stage in self._stages:
            if not isinstance(stage, Shuffle):
                raise ValueError(
                    f".shard() cannot follow {stage.name}: put it right behind the source or "
                    "behind .shuffle()"
                )
        return self._with(shard_of(rank, world, uneven))

    def filter(
        self,
        fn: Callable[[Any], Any],
        *,
        on: str | int | None = None,
        on_error: OnError | None = None,
    ) -> Pipeline:
        """Keep the examples for which a deterministic function is true.

        Those left out are read, and prepared up to here, and not counted; ``len()`` is then not
        known.

        Args:
            fn: called as ``fn(x)``; what is not true (None, too) leaves the example out. It runs in
                worker threads.
            on: the field it looks at, by name, key or position; the whole example without.
            on_error: its own skip budget (see ``from_dataset``); by default the pipeline's.

        Raises TypeError when ``fn`` cannot be called so, ValueError after ``batch``.
        """
        check_function(fn, random=False, stage="filter")
        check_on(on)
        if isinstance(self._source, LoaderSource) or self._has(Batch):
            raise ValueError(".filter() works on examples: put it before .batch()")
        self._check_fields(on)
        return self._with(Filter(fn, on, *self._own_budget(on_error)))

    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        on: str | int | None = None,
        on_error: OnError | None = None,
    ) -> Pipeline:
        """Apply a deterministic function to every example, or to every batch after ``batch``.

        Args:
            fn: called as ``fn(x)``; what it returns, which must not be None, replaces ``x``. It
                runs in worker threads.
            on: the field it works on, by name, key or position; the whole example without.
            on_error: its own skip budget (see ``from_dataset``); by default the pipeline's.

        Raises TypeError when ``fn`` cannot be called so, LookupError when the source is known
        not to have the field.
        """
        return self._mapped(fn, on, on_error, random=False)

    def random_map(
        self,
        fn: Callable[[Any, Any], Any],
        *,
        on: str | int | None = None,
        on_error: OnError | None = None,
    ) -> Pipeline:
        """Apply a function that draws random numbers: after an echo, anew for every use.

        Args:
            fn: called as ``fn(x, rng)`` with a ``numpy.random.Generator``, valid during the
                call only (behind ``.to(device)``, a ``torch.Generator`` on that device). What it
                draws depends on seed, epoch, example and use, never on workers. What it returns
                must not be None.
            on: the field it works on, by name, key or position; the whole example without.
            on_error: its own skip budget (see ``from_dataset``); by default the pipeline's.

        Raises TypeError when ``fn`` takes no ``rng``, LookupError when the source is known not
        to have the field.
        """
        return self._mapped(fn, on, on_error, random=True)

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
        if not is_whole_number(n):
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

    def echo(
        self,
        factor: float | str = "auto",
        *,
        max_factor: int | None = None,
        pool: int | str | None = None,
        replay: Mapping[str, Any] | None = None,
    ) -> Pipeline:
        """Use items more than once: data echoing (Choi et al., arXiv 1907.05550).

        Where it stands decides what is echoed. Before ``random_map``: *example echoing before
        augmentation*; between it and ``batch``: *example echoing after augmentation*; after
        ``batch``: *batch echoing*; after ``to``: batch echoing on the device.

        With ``"auto"`` the factor follows the stall: a fresh item is used as soon as it is ready;
        while none is, the item whose last use is oldest is used again (none that was in the batch
        before); only when all of those were used ``max_factor`` times the consumer waits. Where
        fresh items come fast enough nothing is echoed. What happens then depends on time;
        ``record()`` has it, and ``replay=`` repeats it.

        Args:
            factor: ``"auto"``, or the mean uses of each fresh item, at least 1; fractions by error
                diffusion. 1 changes nothing.
            max_factor: with ``"auto"``, the most uses of one item, at least 2; by default 4.
            pool: the items kept, in examples (after ``batch``: batches), or in bytes
                (``"2GiB"``; with a warning fewer, where memory has not so much). By default the
                smaller of 16 batches and 10 % of usable memory.
            replay: what ``record()`` returned: repeats that run exactly, for any number of
                workers. Pool, ``max_factor`` and, if none was given, the seed are the record's.

        Raises TypeError or ValueError for a factor below 1, a pool too small for a batch, or
        arguments that do not go together; StateError for a damaged record.
        """
        size, size_bytes = _pool_size(pool)
        position = sum(isinstance(stage, Echo) for stage in self._stages)
        if factor == "auto":
            most = _max_factor(max_factor)
            record = None
            if replay is not None:
                if pool is not None or max_factor is not None:
                    raise ValueError("replay= has pool and max_factor of its own: leave them out")
                record = read_record(replay, self._most_items())
                most = record.echo(position, ".echo(replay=)").max_factor
            twin = self._with(Echo(None, most, size, size_bytes, position, record))
            if record is not None and self._given_seed is None:
                twin._reset(record.seed)
            return twin
        if isinstance(factor, str):
            raise TypeError(
                f'the echoing factor is "auto" or a number of at least 1, not {factor!r}'
            )
        if max_factor is not None or replay is not None:
            raise ValueError('max_factor= and replay= go with .echo("auto")')
        exact = exact_factor(factor)
        if exact == 1:
            return self._with()
        most = -(-exact.numerator // exact.denominator)
        return self._with(Echo(exact, most, size, size_bytes, position))

    def cache(
        self,
        limit: int | float | str = "auto",
        *,
        path: str | os.PathLike[str] | None = None,
        keep: bool | None = None,
        version: str | None = None,
        admit: str = "first",
        keep_pages: bool = False,
        on_damage: str = "rebuild",
    ) -> Pipeline:
        """Keep what comes here, and never evict it: from then on it is not read or made again.

        Behind the source raw bytes are kept, behind a ``map`` what it made. Examples enter as
        they come until the limit is reached; then nothing enters and nothing leaves, which gives
        the fewest misses there can be, every epoch (MinIO caching, Mohan et al., VLDB 2021,
        section 6.1). All processes of this host that cache the same share one store: workers,
        ranks, other jobs. A cache changes nothing of what comes out, nor of the state.

        Args:
            limit: of the store, fixed when it is made: bytes (``"64GiB"``), a share of usable
                memory (``0.5``; with ``path`` of the disk's free space), or ``"auto"``: half of
                memory (four fifths of the disk).
            path: a folder on a local disk, in front of slower storage; by default in memory.
            keep: whether it stays when nobody uses it any more, for the next run; by default with
                ``path``.
            version: says which data and functions these are, where stoker cannot tell: behind a
                ``map`` of your own, for datasets, arrays in memory, and servers that tell no
                versions. Jobs with the same version share; without one a job shares with itself.
            admit: ``"first"``, or ``"worth"``: what saves most time per byte, where examples
                differ in that.
            keep_pages: leave the local files of what is in the cache in the page cache, too.
            on_damage: ``"rebuild"`` a store that was damaged, or ``"refuse"`` it (CacheError).

        Raises ValueError where there is nothing to keep: on streams and loaders, behind random
        maps, echoes and batches, twice; TypeError or ValueError for other wrong arguments; and,
        when the first example would enter, StageError if it is another one each time it is made.
        """
        from stoker.cache.example_cache import ExampleCache
        from stoker.cache.identity import chain_identity

        self._check_cacheable()
        if version is not None and (not isinstance(version, str) or not version):
            raise TypeError(f"version= is a text, not {version!r}")
        maps = [stage for stage in self._stages if isinstance(stage, (Map, Filter))]
        names = [self._source.name, *(stage.name for stage in maps)]
        cache = ExampleCache(
            limit,
            path=path,
            keep=keep,
            identity=chain_identity(self._source, maps, version),
            describes=".".join(names),
            examples=len(self._source),
            admit=admit,
            on_damage=on_damage,
        )
        return self._with(CacheStage(cache, bool(keep_pages)))

    def _check_cacheable(self) -> None:
        if isinstance(self._source, LoaderSource):
            raise ValueError(
                "a loader's batches are others in every epoch: cache its dataset instead, "
                "DataLoader(stoker.cached(dataset, limit), ...)"
            )
        if isinstance(self._source, IterableSource):
            raise ValueError(
                "a stream is read once, and its examples have no index to find them by: a cache "
                "cannot help. (To use them more than once: .echo())"
            )
        for stage in self._stages:
            if isinstance(stage, Map) and stage.random:
                raise ValueError(
                    f".cache() cannot follow {stage.name}: what it draws would be the same in "
                    "every epoch. Put .cache() before it"
                )
            if isinstance(stage, Echo):
                raise ValueError(
                    f".cache() cannot follow {stage.name}, which hands out each example several "
                    "times: put .cache() before it"
                )
            if isinstance(stage, (Batch, To)):
                raise ValueError(
                    f".cache() keeps examples, and batches are others in every epoch: put it "
                    f"before {stage.name}"
                )
            if isinstance(stage, CacheStage):
                raise ValueError("a pipeline has one cache: choose a place for it")

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
        if not is_whole_number(n):
            raise TypeError(f"a number of workers is a whole number, not {n!r}")
        if n < (1 if kind == "process" else 0):
            raise ValueError(f"{kind} workers cannot be {n} in number")
        twin = self._with()
        twin._workers = Workers(int(n), kind)
        return twin

    def steps(self, n: int) -> Pipeline:
        """End an epoch after ``n`` batches, so that ``len()`` is known under ``.echo("auto")``.

        Examples that were not reached then are not used in that epoch. Where an epoch has fewer
        batches a warning says so; an error, where other ranks may have more and would wait (under
        ``.shard()`` or a process group, where only an epoch's end tells how many there are).

        Args:
            n: batches (or single examples, in a pipeline without batches), at least 1.
        """
        if not is_whole_number(n):
            raise TypeError(f".steps() takes a whole number of batches, not {n!r}")
        if n < 1:
            raise ValueError(f"an epoch has at least one step, not {n}")
        twin = self._with()
        twin._steps = int(n)
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
            if not cursor.has_handed_out_all():
                warn(
                    "a second iterator over one pipeline closes the first; give each loop a "
                    "pipeline of its own (every method returns a new one)",
                )
            live.close()
        epoch, position = cursor.upcoming()
        self._check_ranks()
        self._check_workers()
        self._check_replay()
        for at, stage in enumerate(self._stages):
            if isinstance(stage, CacheStage):
                if not cursor.warned_of_cache:
                    cursor.warned_of_cache = True
                    say_what_cannot_help(self._source, self._stages, at)
                stage.cache.open()
        plan = compiled(self._source, self._stages, self._budget)
        workers = self._workers or Workers(machine.usable_cores(), "thread")
        run = Run(
            plan,
            self._seed,
            epoch,
            self._autotuner,
            workers,
            cursor.resolved,
            position,
            self._steps,
            ranks() if self._follows() is not None and (process_group() or (0, 1))[1] > 1 else None,
            self._recycler,
            self._known_length(),
        )
        run.wrapper = reads_ahead() if run.length is None else None
        iterator = PipelineIterator(run, cursor)
        cursor.started(epoch, run, iterator)
        return iterator

    def _known_length(self) -> int | None:
        """Return ``len()``, or None where nobody knows it, or may rely on it."""
        if isinstance(self._source, LoaderSource) and not self._source.is_counted:
            return self._steps
        try:
            return len(self)
        except Exception:  # a foreign loader's may raise anything
            return None

    def __len__(self) -> int:
        """Return the number of batches (or examples, without batches) of an epoch.

        Raises TypeError where only the end tells: for streams, loaders without a length, filters,
        skip budgets and ``.echo("auto")``; unless ``.steps(n)`` says when it ends.
        """
        try:
            count = self._batches()
        except TypeError:
            if self._steps is None:
                raise
            return self._steps
        return count if self._steps is None else min(count, self._steps)

    def _batches(self) -> int:
        if isinstance(self._source, IterableSource) and not hasattr(self._source, "__len__"):
            raise TypeError("a stream has no length before it ends; .steps(n) gives it one")
        if self._sifts():
            raise TypeError(
                "the number of batches is not known: examples may be filtered or skipped; "
                ".steps(n) ends an epoch after n"
            )
        count = self._examples()
        for stage in self._stages:
            if isinstance(stage, Echo):
                uses = stage.uses(count)
                if uses is None:
                    raise TypeError(
                        'the number of batches is not known under .echo("auto"), which follows '
                        "the stall; .steps(n) ends an epoch after n"
                    )
                count = uses
            elif isinstance(stage, Batch):
                count = stage.count(count)
        return count

    def _examples(self) -> int:
        """Return this rank's fresh examples (of a loader, batches); TypeError if not known."""
        share = share_of(self._stages)
        count = len(self._source)
        return count if share is None else share.count(count)

    def _most_items(self) -> int | None:
        """Return how many items come out of this chain in an epoch at most, None if not known."""
        if isinstance(self._source, (LoaderSource, IterableSource)):
            return None
        echoes = (stage.max_factor for stage in self._stages if isinstance(stage, Echo))
        return self._examples() * math.prod(echoes)

    def __bool__(self) -> bool:
        """Return True, whatever the length."""
        return True

    @property
    def epoch(self) -> int:
        """The epoch that is being run, or was left early; after a whole epoch, the next one."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; a live iterator is closed. A loader is told, if it can be.

        Right after ``load_state_dict``, the epoch of that state keeps its position.
        """
        if not is_whole_number(epoch) or epoch < 0:
            raise ValueError(f"an epoch is a whole number from 0, not {epoch!r}")
        cursor = self._cursor
        if cursor.loaded and epoch == cursor.epoch:
            return  # to where a state was loaded for: that is where it goes on
        cursor.go_to(int(epoch), None)
        if isinstance(self._source, LoaderSource) and hasattr(self._source.loader, "set_epoch"):
            self._source.loader.set_epoch(int(epoch))

    @property
    def progress(self) -> float:
        """How much of the epoch's fresh examples was handed out, from 0 to 1.

        ``epoch + progress`` is a clock that does not stretch with the echoing factor. Under
        ``.steps(n)`` the share of the steps, if that is more. Raises TypeError for streams and
        loaders without a length, unless ``.steps(n)`` is set.
        """
        done = self._cursor.of_epoch()
        share = done.steps / self._steps if self._steps is not None else None
        try:
            loader = isinstance(self._source, LoaderSource)
            fresh = self._cursor.loaded_batches() if loader else done.fresh_examples
            share = max(share or 0.0, fresh / max(1, self._examples()))
        except TypeError:
            if share is None:
                raise TypeError(
                    "how far an epoch is cannot be told without a length; .steps(n) gives it one"
                ) from None
        return min(1.0, share)

    @property
    def clock(self) -> Clock:
        """Fresh examples, uses and steps that were handed out in all epochs so far."""
        return self._cursor.before + self._cursor.of_epoch()

    def record(self) -> dict[str, Any]:
        """Return what ``.echo("auto")`` decided, in every epoch so far; ready for JSON.

        At most 2 bytes for each batch. ``.echo(replay=record)``, in a chain that is built alike
        and with the same seed, repeats the run exactly.

        Raises ValueError in a pipeline whose factors are all fixed.
        """
        if not any(isinstance(stage, Echo) and stage.follows for stage in self._stages):
            raise ValueError('there is nothing to record: no .echo("auto") stands in this chain')
        return written(self._seed, self._outline(), self._cursor.record())

    @property
    def seed(self) -> int:
        """The seed of shuffling, echoing and random maps."""
        return self._seed

    @property
    def classes(self) -> list[str]:
        """The class names of a folder, in the order of their labels."""
        classes = getattr(self._source, "classes", None)
        if classes is None:
            raise AttributeError("only pipelines from a folder have classes")
        return list(classes)

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self._of_loader("dataset")

    @property
    def batch_size(self) -> Any:
        """The loader's batch size."""
        return self._of_loader("batch_size")

    @property
    def sampler(self) -> Any:
        """The loader's sampler."""
        return self._of_loader("sampler")

    def _of_loader(self, name: str) -> Any:
        if not isinstance(self._source, LoaderSource):
            raise AttributeError(f"only pipelines from a loader have a {name}")
        return getattr(self._source.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the last batch that was yielded, ready for JSON (see below).

        At most a byte for each item in a pool, and 4 KB. Loaded into a pipeline that is
        built alike, it makes the next iteration continue right behind that batch.

        Over a loader that has a state of its own (``StatefulDataLoader``) that is nested in it as
        it is, tensors included (save it with ``torch.save``); ``.echo("auto")`` then goes on with
        an empty pool.

        Behind the last batch of an epoch, as far as ``len()`` tells, it is the state in which the
        next epoch begins. Under a wrapper that reads ahead of training, see ``acknowledge``.

        Raises StateError in the middle of an epoch over a stream or another loader, which cannot be
        made again; and under Lightning without a length or an acknowledgement, because it has read
        a batch ahead that would be lost.
        """
        epoch, position, before = self._cursor.where()
        if isinstance(self._source, Resumable):
            self._check_resumable(position)
            if not position.yielded:
                position = replace(position, loader_state=self._source.between())
        elif position.yielded and isinstance(self._source, IterableSource):
            raise StateError(
                "an epoch over a stream has no state in its middle, for its examples cannot be "
                "asked for again: save between epochs, or use a source with an index"
            )
        if isinstance(self._source, LoaderSource):
            self._check_loader_state(position)
            if not position.yielded:
                position = replace(position, loader_state=self._source.state())
        return state.saved(
            self._outline(), self._seed, epoch, position, self._cursor.resolved, before
        )

    def acknowledge(self, batches: int = 1) -> None:
        """Say that training has finished with so many more of the batches of this iteration.

        For wrappers that read ahead: from the first call on, ``state_dict()`` is the state behind
        the last batch that was acknowledged, so that those which were handed out and not trained on
        come again after a resume. Call it behind each training step, up to 63 batches late and
        before the next ``iter()``; and ``acknowledge(0)`` before the first, if an epoch may be
        shorter than what is read ahead.

        Raises ValueError for more batches than were handed out.
        """
        if not is_whole_number(batches) or batches < 0:
            raise ValueError(f"a number of batches is a whole number from 0, not {batches!r}")
        self._cursor.acknowledge(int(batches))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go to a saved state; the next ``iter()`` continues there. Closes a live iterator.

        Raises StateError when the state belongs to another pipeline, seed or version.
        """
        addressed = not isinstance(self._source, (LoaderSource, IterableSource))
        fit = Fit(
            compiled(self._source, self._stages, self._budget),
            self._examples() if addressed else None,
            self._accounts(),
            self._steps,
        )
        loaded = state.read(saved, self._outline(), self._given_seed, fit)
        self._seed = loaded.seed
        self._cursor.go_to(loaded.epoch, loaded.position)
        self._cursor.resolved = loaded.resolved
        self._cursor.before = loaded.before
        if isinstance(self._source, LoaderSource):
            self._cursor.forget_record()  # pools begin empty: what was decided does not go on

    def stats(self) -> Stats:
        """Return statistics of the epoch being run, or else of the last one."""
        return self._cursor.stats(self._stages)

    def __str__(self) -> str:
        return describe.chain(
            self._source,
            self._stages,
            seed=self._seed,
            drawn=self._given_seed is None,
            workers=self._workers,
            resolved=self._cursor.resolved,
            budget=self._budget,
        )

    def __repr__(self) -> str:
        names = [self._source.name, *(stage.name for stage in self._stages)]
        return f"<stoker.Pipeline {'.'.join(names)} seed={self._seed}>"

    # -- within

    def _with(self, *stages: Any) -> Pipeline:
        twin = object.__new__(type(self))
        twin._source = self._source
        twin._budget = self._budget
        twin._stages = (*self._stages, *stages)
        twin._workers = self._workers
        twin._steps = self._steps
        twin._recycler = self._recycler
        twin._given_seed = self._given_seed
        twin._reset(self._seed)
        return twin

    def _has(self, kind: type) -> bool:
        return any(isinstance(stage, kind) for stage in self._stages)

    def _sifts(self) -> bool:
        """Tell whether examples may be left out on the way."""
        if isinstance(self._source, LoaderSource):
            return False
        budgets = [getattr(stage, "budget", None) for stage in self._stages]
        return (
            self._has(Filter)
            or self._budget != RAISE
            or any(budget is not None and budget != RAISE for budget in budgets)
        )

    def _check_ranks(self) -> None:
        """Refuse what has ranks take unequal numbers of steps; warn of what nobody shards."""
        check_assumed(self._stages)
        share = share_of(self._stages)
        follows = self._follows() is not None
        group = process_group()
        if share is not None and share.world > 1 and self._steps is None:
            if follows and (share.uneven or group is None):
                raise ValueError(
                    '.echo("auto") gives ranks equally many steps where they have equal parts and '
                    "a process group to agree in: .shard() after init_process_group, or "
                    ".steps(n), or a fixed factor"
                )
            budgets_alone = follows and not self._has(Filter)
            if not share.uneven and self._sifts() and not budgets_alone:
                raise ValueError(
                    ".shard() gives every rank equally many steps, but filters and skip budgets "
                    "may leave them unequal: leave examples out before sharding (from_dataset of "
                    "a list of the good ones), end epochs with .steps(n), or take "
                    ".shard(uneven=True) and torch's Join"
                )
        if isinstance(self._source, LoaderSource):
            self._source.warn_unsharded()
        elif share is None:
            warn_unsharded()
        addressed = not isinstance(self._source, (LoaderSource, IterableSource))
        even = share is not None and not share.uneven
        if share is not None and even and addressed and 0 < len(self._source) < share.world:
            warn(
                f"{len(self._source)} examples are fewer than {share.world} ranks: equal parts of "
                "them are empty (.shard(uneven=True) keeps them)",
            )

    def _follows(self) -> Echo | None:
        """Return the first echo that decides by what is ready."""
        echoes = (s for s in self._stages if isinstance(s, Echo) and s.follows)
        return next((echo for echo in echoes if echo.record is None), None)

    def _check_loader_state(self, position: Position) -> None:
        """Refuse a state that a loader cannot go on from."""
        if not position.yielded:
            return
        if not self._source.stateful:
            raise StateError(
                "an epoch over a loader has no state in its middle, for its batches cannot be made "
                "again: save between epochs, take torchdata's StatefulDataLoader, or build on "
                "from_dataset(loader.dataset)"
            )
        if any(isinstance(stage, Echo) and not stage.follows for stage in self._stages):
            raise StateError(
                "in the middle of an epoch over a loader a pool of a fixed factor cannot be made "
                'again: save between epochs, or take .echo("auto"), whose pool may begin empty'
            )

    def _check_resumable(self, position: Position) -> None:
        """Refuse a state in the middle of a feed's epoch that tells too little of what was left."""
        fixed = any(isinstance(stage, Echo) and not stage.follows for stage in self._stages)
        if position.yielded and (fixed or self._sifts() or self._has(Shuffle) or self._has(Shard)):
            raise StateError(
                "in the middle of an epoch of a feed's examples a shuffle buffer, filters, skip "
                "budgets, ranks, and the pool of a fixed factor cannot be made again: save between "
                'epochs, have the feed do these, or take .echo("auto"), whose pool may begin empty'
            )

    def _check_workers(self) -> None:
        """Refuse to follow what nobody prepares meanwhile."""
        echo = self._follows()
        if echo is not None and self._workers is not None and self._workers.count == 0:
            raise ValueError(
                f"{echo.name} follows what workers prepare meanwhile, and .workers(0) leaves none: "
                "give it workers, or a factor"
            )

    def _check_replay(self) -> None:
        """Refuse to replay what another pipeline did."""
        for stage in self._stages:
            record = stage.record if isinstance(stage, Echo) else None
            if record is None:
                continue
            if record.seed != self._seed:
                raise StateError(
                    f"the record is of another run: its seed is {record.seed}, this pipeline's "
                    f"is {self._seed}"
                )
            if record.pipeline != self._outline():
                difference = state.difference_of(record.pipeline, self._outline())
                raise StateError(f"the record belongs to another pipeline: {difference}")

    def _check_fields(self, on: str | int | None) -> None:
        kept = (Shuffle, Shard, Filter, CacheStage)
        if all(isinstance(s, kept) or getattr(s, "on", None) is not None for s in self._stages):
            check_fields(self._source, on)

    def _mapped(self, fn: Any, on: Any, on_error: OnError | None, *, random: bool) -> Pipeline:
        check_function(fn, random=random, stage="random_map" if random else "map")
        check_on(on)
        self._check_fields(on)
        budget, account = self._own_budget(on_error)
        if budget is not None and (isinstance(self._source, LoaderSource) or self._has(Batch)):
            raise ValueError("on_error= is for examples: a stage behind .batch() raises")
        position = sum(isinstance(s, Map) and s.random for s in self._stages)
        return self._with(Map(fn, on, random, position, budget, account))

    def _own_budget(self, on_error: OnError | None) -> tuple[Budget | None, int]:
        """Return a stage's own budget and the number of its account, if it has one."""
        return (None, 0) if on_error is None else (budget_of(on_error), self._accounts() + 1)

    def _accounts(self) -> int:
        """Count the stages that may have accounts: a cache changes no state."""
        return sum(not isinstance(stage, CacheStage) for stage in self._stages)

    def _outline(self) -> list[str]:
        """Return what must be alike for a state to fit."""
        known = not isinstance(self._source, (LoaderSource, IterableSource))
        kind = type(self._source).__name__
        lines = [f"{kind} of {len(self._source)}" if known else kind]
        for stage in self._stages:
            if isinstance(stage, Map):
                field = "" if stage.on is None else f" on {stage.on!r}"
                lines.append(("random_map" if stage.random else "map") + field)
            elif isinstance(stage, Batch):
                lines.append(f"batch({stage.n}, drop_last={stage.drop_last})")
            elif isinstance(stage, Echo):
                size = stage.pool if stage.pool is not None else stage.pool_bytes
                lines.append(
                    f"echo({stage.factor}, pool={size})"
                    if stage.factor is not None
                    else f"echo(auto, max_factor={stage.max_factor})"
                )
            elif isinstance(stage, Filter):
                field = "" if stage.on is None else f" on {stage.on!r}"
                lines.append("filter" + field)
            elif isinstance(stage, Shuffle):
                lines.append(stage.name)
            elif isinstance(stage, Shard):  # ranks of equal length share a state
                lines.append(stage.name if stage.uneven else f"shard(world={stage.world})")
        return lines


def _max_factor(most: Any) -> int:
    if most is None:
        return DEFAULT_MAX_FACTOR
    if not is_whole_number(most):
        raise TypeError(f"max_factor= takes a whole number, not {most!r}")
    if most < 2:
        raise ValueError(f"max_factor= is at least 2, not {most}: .echo(1) echoes nothing")
    if most > MOST_FACTOR:
        raise ValueError(f"max_factor= is at most {MOST_FACTOR:,}, not {most:,}")
    return int(most)


def _pool_size(pool: Any) -> tuple[int | None, int | None]:
    if pool is None:
        return None, None
    if isinstance(pool, str):
        size = machine.parse_bytes(pool)
        if not size:
            raise ValueError(f"a pool of {pool!r} holds nothing")
        return None, size
    if not is_whole_number(pool):
        raise TypeError(f"pool= takes a number of items or a size such as '2GiB', not {pool!r}")
    if pool < 1:
        raise ValueError(f"a pool holds at least one item, not {pool}")
    return int(pool), None
