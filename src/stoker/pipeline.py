"""What users hold: a chain of stages, and a cursor over its epochs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, overload

from numpy.typing import NDArray

from stoker.chain import Chain
from stoker.cursor import Cursor
from stoker.describe import describe
from stoker.engine.pool.make import Workers
from stoker.iterator import PipelineIterator, T
from stoker.loader_face import LoaderFace
from stoker.rounds import Rounds
from stoker.schedule.record import read as read_record
from stoker.stages.batch import Batch
from stoker.stages.cache import CacheStage
from stoker.stages.echo import Echo, Factor
from stoker.stages.filter import Filter
from stoker.stages.map import Map
from stoker.stages.pack import Pack, Packed
from stoker.stages.shard import Shard
from stoker.stages.shuffle import Shuffle
from stoker.stages.skip import OnError
from stoker.stages.skip_first import SkipFirst
from stoker.stages.stage import Stage
from stoker.stages.take import Take
from stoker.stages.to import To
from stoker.stats import Clock, Stats, Uses

U = TypeVar("U")
Int = int | None
On = str | int | None
Err = OnError | None
Draws = Callable[[Any, Any], Any]
Rows = TypeVar("Rows", bound=NDArray[Any] | tuple[NDArray[Any], ...])


class Pipeline(LoaderFace, Generic[T]):
    """A chain of stages over a source, and a cursor: epoch, position, statistics.

    Each method returns a new pipeline with a fresh cursor and leaves this one as it is. Iterating
    runs one epoch; the next ``iter()`` is the next. One thread at a time may iterate. Yields ``T``.
    """

    def __init__(self, chain: Chain) -> None:
        self._cursor = Rounds(chain) if chain.flows else Cursor(chain)

    def _then(self, stage: Stage) -> Pipeline[Any]:
        return Pipeline(self.chain.then(stage))

    def shuffle(self, buffer: Int = None, *, block: int | bool | None = None) -> Pipeline[T]:
        """Draw a new order every epoch.

        A true permutation up to 2^20 examples; above, a keyed one in O(1) memory. Streams are
        shuffled through a buffer, in which an example that is drawn is replaced by the next one.

        Args:
            buffer: for streams alone, its examples, which stay in memory; by default 1,000.
            block: shuffle by blocks of so many neighbours, or (True) the source's own, 16 at a
                time; False: as a whole. By default Parquet and remote shards by their own.

        Raises ValueError where there is no order: after ``echo`` or ``batch``, twice, on a loader.
        """
        return self._then(Shuffle(buffer, block))

    def shard(
        self,
        mesh: Any = None,
        *,
        mesh_dims: str | Sequence[str] | None = None,
        rank: Int = None,
        world: Int = None,
        uneven: bool = False,
        near: str | None = None,
        pad: bool | str = False,
        mask: str | None = None,
        env: bool = False,
    ) -> Pipeline[T]:
        """Leave this process its part of every epoch: disjoint parts of equal length.

        Of ``n`` examples each rank gets ``n // world``; which ones are left over changes with the
        epoch. Before ``shuffle`` a rank's part is fixed (for a cache on each host); after it,
        parts are drawn anew every epoch. Of a stream, rank ``r`` takes every ``world``-th
        example. A seed that nobody gave is rank 0's, at the first ``iter()``.

        Args:
            mesh: a torch ``DeviceMesh``, whole; along dimensions of a model batches are equal.
            mesh_dims: the dimensions that split the data, where names such as "dp" do not tell.
            rank, world: this process among so many; by default those of ``torch.distributed``,
                ``jax.distributed`` or Ray Train. Without them this is the only process.
            uneven: keep all examples, so that ranks may differ by one.
            pad: for evaluation: keep all examples, each once over all ranks, and repeat the last
                one until all ranks have equally many rows (``"full"``: whole batches). What ranks
                gather is in the order of the data, the padding last; ``last.valid`` tells.
            mask: the name of a field ``bool [n]`` of batches that tells it: False for padding. A
                dict gets that key, a tuple one element more; else ``(batch, mask)`` comes.
            near: ``"cache"`` deals the examples of each global batch to the ranks whose nodes
                keep them (``.cache(cluster=...)``); needs ``shuffle`` before it.
            env: without a process group, take what torchrun, srun or mpirun say by variables.

        Raises ValueError on a loader, where a launcher tells of others without a process group, and
        for a mesh that does not tell; ``iter()`` where ranks differ, or one does not come.
        """
        shard = Shard.of(rank, world, uneven, near, mesh, mesh_dims, env=env)
        return self._then(shard.padded(pad, mask))

    def take(self, n: int) -> Pipeline[T]:
        """Leave the first ``n`` examples of every epoch; the others are not read.

        Before ``shuffle`` they are the same in every epoch (to try things out, or to overfit);
        after it, others are drawn each time. After ``shard`` each rank has ``n``. Examples that a
        skip budget leaves out later are counted.

        Raises ValueError after ``filter``, ``echo`` or ``batch`` and on a loader: ``.steps(n)``
        ends an epoch after ``n`` batches.
        """
        return self._then(Take.of(n))

    def skip(self, n: int) -> Pipeline[T]:
        """Leave out the first ``n`` examples of every epoch: what ``take(n)`` leaves out, comes.

        So ``p.take(80), p.skip(80)`` is a split. Only of a stream are they read for it. Raises as
        ``take`` does, and on a mixture. ``resume_at`` begins an epoch behind its first batches.
        """
        return self._then(SkipFirst.of(n))

    def filter(
        self, fn: Callable[[Any], Any], *, on: On = None, on_error: Err = None
    ) -> Pipeline[T]:
        """Keep the examples for which a deterministic function is true.

        Those left out are read, and prepared up to here, and not counted; ``len()`` is then not
        known.

        Args:
            fn: called as ``fn(x)`` in workers; what is not true (None, too) leaves ``x`` out.
            on, on_error: as in ``map``.

        Raises TypeError when ``fn`` cannot be called so, ValueError after ``batch``.
        """
        return self._then(Filter.of(fn, on, on_error))

    @overload
    def map(
        self, fn: Callable[[T], U], *, on: None = None, on_error: Err = None
    ) -> Pipeline[U]: ...

    @overload
    def map(
        self, fn: Callable[[Any], Any], *, on: str | int, on_error: Err = None
    ) -> Pipeline[Any]: ...

    def map(
        self, fn: Callable[[Any], Any], *, on: On = None, on_error: Err = None
    ) -> Pipeline[Any]:
        """Apply a deterministic function to every example, or to every batch after ``batch``.

        Args:
            fn: called as ``fn(x)``; what it returns, which must not be None, replaces ``x``. It
                runs in worker threads, each with a copy of its own.
            on: the field it works on, by name, key or position; the whole example without.
            on_error: its own skip budget (see ``from_dataset``); by default the pipeline's.

        Raises TypeError when ``fn`` cannot be called so, LookupError when there is no such field.
        """
        return self._then(Map.of(fn, on, on_error, is_random=False))

    @overload
    def random_map(
        self, fn: Callable[[T, Any], U], *, on: None = None, on_error: Err = None
    ) -> Pipeline[U]: ...

    @overload
    def random_map(
        self, fn: Draws, *, on: On, on_error: Err = None, repeats_only: bool = False
    ) -> Pipeline[Any]: ...

    @overload
    def random_map(
        self, fn: Draws, *, on_error: Err = None, repeats_only: bool
    ) -> Pipeline[Any]: ...

    def random_map(
        self, fn: Draws, *, on: On = None, on_error: Err = None, repeats_only: bool = False
    ) -> Pipeline[Any]:
        """Apply a function that draws random numbers: after an echo, anew for every use.

        Args:
            fn: called as ``fn(x, rng)`` with a ``numpy.random.Generator``, valid during the
                call only (behind ``.to``, a ``torch.Generator`` on that device, or a key of JAX).
                What it draws depends on seed, epoch, example and use, never on workers. What it
                returns must not be None.
            on, on_error: as in ``map``.
            repeats_only: leave first uses alone; behind an echo, before ``batch``.

        Raises TypeError when ``fn`` takes no ``rng``, LookupError when there is no such field.
        """
        return self._then(Map.of(fn, on, on_error, is_random=True, repeats_only=repeats_only))

    def pack(self, length: int) -> Pipeline[Packed]:
        """Join ragged sequences of tokens into full ones: ``(tokens, segments, positions)``.

        Arrays ``[n]`` of integers, or lists, follow each other and are cut where one is full; what
        is left at an epoch's end is dropped. ``segments`` numbers the sequences in each from 0 on,
        ``positions`` their tokens, both ``int32 [length]``. Uses count full sequences.

        Raises ValueError after ``batch``, twice, or on a loader; no ``echo`` can follow.
        """
        return self._then(Pack.of(length))

    @overload
    def batch(
        self: Pipeline[Rows], n: int, *, drop_last: bool = False, collate: None = None
    ) -> Pipeline[Rows]: ...

    @overload
    def batch(
        self, n: int, *, drop_last: bool = False, collate: Callable[[list[T]], U]
    ) -> Pipeline[U]: ...

    @overload
    def batch(self, n: int, *, drop_last: bool = False, collate: None = None) -> Pipeline[Any]: ...

    def batch(
        self, n: int, *, drop_last: bool = False, collate: Callable[[list[Any]], Any] | None = None
    ) -> Pipeline[Any]:
        """Stack examples into batches of ``n``.

        Tuples, dicts, dataclasses and named tuples keep their form. Their arrays and numbers become
        arrays ``[n, ...]`` of the same dtype (all tensors, if one is a torch tensor); strings and
        bytes become lists. Numbers of several types (``3`` beside ``np.int32(3)``, ``2.5`` or True)
        become ``int64``, ``float64`` or ``complex128``. Sparse tensors of layout ``sparse_coo``
        become one. The arrays are yours to write into; freed memory is used again.

        Args:
            n: examples in a batch; the last one of an epoch may have fewer.
            drop_last: leave that last one out.
            collate: called with the list of examples instead; what it returns is the batch.
        """
        return self._then(Batch.of(n, drop_last, collate))

    def echo(
        self,
        factor: Factor = "auto",
        *,
        max_factor: int | None = None,
        min_distance: int | None = None,
        pool: int | str | None = None,
        replay: Mapping[str, Any] | None = None,
    ) -> Pipeline[T]:
        """Use items more than once: data echoing (Choi et al., arXiv 1907.05550).

        Where it stands says what is echoed. Before ``random_map``: *example echoing before
        augmentation*; between it and ``batch``: *example echoing after augmentation*; after
        ``batch``: *batch echoing*; after ``to``: that on the device.

        With ``"auto"`` the factor follows the stall. A fresh item is used as soon as it is ready.
        While nothing fresh is ready, the least recently used item is repeated, unless it was used
        less than ``min_distance`` steps ago or ``max_factor`` times. Only without such an item the
        consumer waits. ``record()`` returns what was decided, and ``replay=`` repeats it.

        Args:
            factor: ``"auto"``, or the mean uses of each fresh item, at least 1, or a ``Fraction``;
                behind ``mix`` also a list, one for each part.
            max_factor: with ``"auto"``, the most uses of one item, at least 2; by default 4.
            min_distance: with ``"auto"``, the fewest steps between two uses of an item, at least 2;
                by default 8. Fewer in the first 48 steps, and if the pool holds fewer batches.
            pool: the items kept, in examples (after ``batch``: batches) or bytes (``"2GiB"``; less,
                with a warning, if memory is short); by default 16 batches, or 10 % of memory.
            replay: what ``record()`` returned: repeats that run exactly, for any number of
                workers. What was said to "auto" and, if none was given, the seed are the record's.

        Raises TypeError or ValueError for a factor below 1, a pool too small for a batch, or
        arguments that do not go together; StateError for a damaged record.
        """
        chain = self.chain
        record = None if replay is None else read_record(replay, chain.most_items())
        stage = Echo.of(factor, max_factor, min_distance, pool, record)
        chain = chain if stage is None else chain.then(stage)
        if record is not None and chain.is_seed_drawn:
            chain = chain.seeded(record.seed)
        return Pipeline(chain)

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
        cluster: str | Sequence[str] | None = None,
        insecure: bool = False,
    ) -> Pipeline[T]:
        """Keep what comes here, and never evict it: from then on it is not read or made again.

        After the source it keeps raw bytes, after a ``map`` the map's results. Examples enter as
        they come, until the limit is reached; then nothing enters and nothing leaves, which gives
        the fewest misses in every epoch (MinIO caching, VLDB 2021, section 6.1). All processes of
        this host that cache the same data share a store. Batches and state do not change.

        Args:
            limit: of the store when it is made: bytes (``"64GiB"``), a share of usable memory
                (``0.5``; with ``path`` of the free disk), or ``"auto"``: half (four fifths).
            path: a folder on a local disk, in front of slower storage; by default in memory.
            keep: whether it stays when nobody uses it any more; by default with ``path``.
            version: says which data and functions these are, where stoker cannot tell: behind maps
                of your own, for datasets, arrays, servers that tell no versions. Jobs of the same
                version share; without one a job shares with itself.
            admit: ``"first"``, or ``"worth"``: what saves most time per byte.
            keep_pages: leave the local files of what is in the cache in the page cache, too.
            on_damage: ``"rebuild"`` a damaged store, or ``"refuse"`` it (CacheError).
            cluster: spread it over nodes: ``"ray"``, ``"torchrun"``, or keepers' addresses.
            insecure: do not encrypt what crosses the network between them: where it is trusted.

        Raises ValueError where there is nothing to keep: on streams and loaders, behind random
        maps, echoes and batches, twice; TypeError or ValueError for other wrong arguments; and,
        when the first example would enter, StageError if it is another one each time it is made.
        """
        settings = {"path": path, "keep": keep, "admit": admit, "on_damage": on_damage}
        return self._then(
            CacheStage.of(self.chain, limit, version, keep_pages, cluster, insecure, **settings)
        )

    def workers(
        self,
        n: int | str,
        *,
        kind: str = "thread",
        ray_options: Mapping[str, Any] | None = None,
        insecure: bool = False,
    ) -> Pipeline[T]:
        """Set how many workers there may be; by default as many threads as there are usable cores.

        Each thread calls its own copies of the dataset and the functions. What cannot be copied is
        called by one thread at a time, with a warning; ``stoker.thread_safe`` shares instead.

        Args:
            n: of threads an upper bound, 0 for none; else the number. Of actors also ``"auto"``.
            kind: ``"process"`` for Python code that holds the GIL: each has a copy of the dataset,
                and seeds global random generators for every example. ``"ray"``: so do actors of
                the Ray cluster joined, placed by ``ray_options`` (default ``{"num_cpus": 1}``).
            insecure: do not encrypt what crosses the network to actors: where it is trusted.
        """
        if self.chain.source.yields_batches:
            raise ValueError("a loader has workers of its own: set them there (num_workers=)")
        return Pipeline(replace(self.chain, workers=Workers.of(n, kind, ray_options, insecure)))

    def steps(self, n: int) -> Pipeline[T]:
        """End an epoch after ``n`` batches, so that ``len()`` is known under ``.echo("auto")``.

        Examples that were not reached then are not used in that epoch. Without batches, examples
        are counted. Where an epoch has fewer a warning says so; an error, where other ranks may
        have more and would wait (where only an epoch's end tells how many there are).
        """
        return Pipeline(self.chain.ending(n))

    def repeat(self) -> Pipeline[T]:
        """Have passes over the data follow each other, so that an epoch is exactly ``.steps(n)``.

        Whatever the factor, and however many examples filters leave out. An epoch ends behind ``n``
        batches, and the next one goes on there. ``epoch``, ``progress`` and ``clock`` tell of the
        data: ``epoch`` counts passes. Without ``.steps(n)`` the first epoch never ends. The last
        batch of a pass may be short (``.batch(n, drop_last=True)``).
        """
        return Pipeline(self.chain.flowing())

    def to(self, device: Any) -> Pipeline[Any]:
        """Hand out torch tensors on a device, the next batch being copied meanwhile.

        On the CPU tensors share the arrays' memory. A ``jax.Device`` or ``jax.sharding.Sharding``
        gives JAX arrays. Raises ImportError without torch, ValueError before ``batch``, TypeError
        for what is no device; ``iter()`` raises RuntimeError where the device is not there, so
        that a pipeline can be built and shown anywhere.
        """
        return self._then(To.of(device))

    def __iter__(self) -> PipelineIterator[T]:
        """Start the next epoch, or go on in one that was loaded."""
        return self._cursor.begin()

    def __len__(self) -> int:
        """Return the batches (or examples, without batches) of the epoch being run, or the next.

        Raises TypeError where only the end tells: for streams, loaders without a length, filters,
        skip budgets and ``.echo("auto")``; unless ``.steps(n)`` says when it ends.
        """
        return self._cursor.coming.count()

    def __bool__(self) -> bool:
        return True

    @property
    def epoch(self) -> int:
        """The epoch that is being run, or was left early; after a whole epoch, the next one."""
        return self._cursor.epoch

    @property
    def progress(self) -> float:
        """How much of the epoch's fresh examples was handed out, from 0 to 1.

        Under ``.steps(n)`` the share of the steps, if that is more. Raises TypeError for streams
        and loaders without a length, unless ``.steps(n)`` is set.
        """
        return self._cursor.progress()

    @property
    def clock(self) -> Clock:
        """Fresh examples, uses and steps that were handed out in all epochs so far."""
        return self._cursor.before + self._cursor.of_epoch()

    @property
    def last(self) -> Uses:
        """Which use of its example each is that was handed out last, and how long after another."""
        return self._cursor.last_uses()

    def record(self) -> dict[str, Any]:
        """Return what ``.echo("auto")`` decided, in every epoch so far; ready for JSON.

        At most 2 bytes for each batch. ``.echo(replay=record)``, in a chain that is built alike
        and with the same seed, repeats the run exactly. Raises ValueError without such an echo.
        """
        return self._cursor.record()

    @property
    def seed(self) -> int:
        """The seed of shuffling, echoing and random maps; of ranks, see ``shard``."""
        return self.chain.seed

    @property
    def class_names(self) -> list[str]:
        """The class names of a folder or a data set, in the order of their labels."""
        return list(self.chain.source.attribute("class_names"))

    def stats(self) -> Stats:
        """Return statistics of the epoch being run, or else of the last one."""
        return self._cursor.stats()

    def __str__(self) -> str:
        return describe(self._cursor.coming, self._cursor.sizes)

    def __repr__(self) -> str:
        return f"<stoker.Pipeline {self.chain}>"
