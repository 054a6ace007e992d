"""The pipeline: a chain of stages, and a cursor over its epochs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from stoker.batching.joining import Packed
from stoker.chain.chain import Chain
from stoker.chain.cursor import Cursor
from stoker.chain.epoch_api import EpochApi, UnusedCheck
from stoker.chain.inspection.cache_place import with_best_cache
from stoker.chain.inspection.describe import describe
from stoker.chain.inspection.examples import example_of, labels_of, name_of, next_output
from stoker.chain.iterator import T
from stoker.chain.step_epochs import StepEpochs
from stoker.echoing.stage import Echo, Factor
from stoker.engine.skip import MaxErrors
from stoker.engine.workers.make import Workers
from stoker.errors import CombinationError
from stoker.foreign import METHODS, explain_calls, hint
from stoker.stages.balance import Balance
from stoker.stages.batching.batch import Batch
from stoker.stages.batching.planned import MEASURED, PlannedBatch, measured
from stoker.stages.cache import CacheStage
from stoker.stages.composite import Stage
from stoker.stages.filter import Filter
from stoker.stages.late import Late
from stoker.stages.map import Map
from stoker.stages.ordering.order import OwnOrder
from stoker.stages.ordering.select import Select, folds_of, parts_of, sample_of
from stoker.stages.ordering.shuffle import Shuffle
from stoker.stages.ordering.take import SkipFirst, Take
from stoker.stages.ordering.weighted import Sample
from stoker.stages.pack import Pack
from stoker.stages.scan import Scan
from stoker.stages.shard import Shard
from stoker.stages.stage import ChainStage
from stoker.stages.to import To
from stoker.stats import Stats, as_metrics

U = TypeVar("U")
Int = int | None
On = str | int | Sequence[str | int] | None
Err = MaxErrors | None
Draws = Callable[[Any, Any], Any]
Rows = TypeVar("Rows", bound=NDArray[Any] | tuple[NDArray[Any], ...])


class Pipeline(EpochApi[T]):
    """A chain of stages over a source, and a cursor: epoch, position, statistics.

    Each method returns a new pipeline with a fresh cursor and leaves this one unchanged. Each
    ``iter()`` runs the next epoch. One thread at a time may iterate. Yields ``T``.
    """

    def __init__(self, chain: Chain) -> None:
        if not isinstance(chain, Chain):
            raise TypeError(
                f"a pipeline begins with a source: stoker.from_dataset({type(chain).__name__}), "
                "from_iterable, from_arrays, from_folder"
            )
        self._unused_check = UnusedCheck()
        self._position = StepEpochs(chain) if chain.flows else Cursor(chain)

    def _then(self, stage: ChainStage) -> Pipeline[Any]:
        return self._derive(self.chain.then(stage), stage.name)

    def _derive(self, chain: Chain, call: str) -> Pipeline[Any]:
        made = Pipeline[Any](chain)
        self._unused_check.note_derived(made._unused_check, made, call)
        return made

    def apply(self, stage: Stage) -> Pipeline[Any]:
        """Add a stage of your own: a ``stoker.Stage``, which is made of the methods below.

        Raises TypeError for any other object, and the errors of its ``check`` and of the methods.
        """
        if not isinstance(stage, Stage):
            raise TypeError(f".apply() takes a stoker.Stage, not {type(stage).__name__}")
        return Pipeline(self.chain.apply(stage, self))

    def shuffle(self, buffer: Int = None, *, block: int | bool | None = None) -> Pipeline[T]:
        """Draw a new order every epoch.

        A true permutation up to 2^20 examples; above, a keyed one in O(1) memory. Streams use a
        buffer: an example is drawn from it, and the next one of the stream takes its place.

        Args:
            buffer: for streams only, the number of examples in the buffer; by default 1,000.
            block: shuffle by blocks of this many neighbours, or (True) the source's own blocks, 16
                at a time; False: as a whole. By default Parquet above 256 MiB and
                remote shards with two examples or more to a MiB use their own.

        Raises ValueError after ``echo`` or ``batch``, after another order, and on a loader.
        """
        return self._then(Shuffle(buffer, block))

    def sample(
        self, weights: Any, *, num_samples: Int = None, replacement: bool = True
    ) -> Pipeline[T]:
        """Draw the examples of each epoch by weights, in a new order: for unbalanced classes.

        An example comes as often as its share of the epoch says, rounded down or up, in every
        epoch: so draws vary less than those of torch's ``WeightedRandomSampler``.

        Args:
            weights: one for each example of the source, ``[n]``, the field that has them, or
                ``fn(epoch)``. Arrays are copied, unless read-only, as a memory map is.
            num_samples: the examples in an epoch; by default as many as the source has.
            replacement: False: no example comes twice in an epoch. Takes 24 bytes an example.

        Raises TypeError or ValueError for other weights; ValueError as ``select``.
        """
        return self._then(Sample.of(weights, num_samples, replacement))

    def order(
        self, fn: Callable[[int, np.random.Generator], Any], length: Int = None
    ) -> Pipeline[T]:
        """Let a function choose the examples of each epoch and their order.

        Numbers may repeat (oversampling) or be left out (curriculum). All ranks must return the
        same: each then gets its part. A state holds a digest of the order; a resume calls ``fn``
        again, and raises StateError if it returns another one.

        Args:
            fn: called as ``fn(epoch, rng)`` by each ``iter()``, and once for each pass of
                ``repeat``; ``rng`` is a ``numpy.random.Generator`` of seed and epoch. Returns
                numbers of the source ``[length]``, copied, 4 bytes each; or an object with
                ``__len__`` and ``at(places)``, which maps places ``int64 [k]`` to numbers ``[k]``
                and is called by any thread.
            length: the number of examples in an epoch; by default that of the source.

        Raises TypeError if ``fn`` does not take two arguments; ValueError as ``select``. ``iter()``
        raises StageError if ``fn`` raises, or returns other values.
        """
        return self._then(OwnOrder.of(fn, length))

    def shard(
        self,
        *,
        rank: Int = None,
        world_size: Int = None,
        mesh: Any = None,
        mesh_dims: str | Sequence[str] | None = None,
        remainder: Literal["drop", "uneven", "pad", "pad_full"] = "drop",
        mask: str | None = None,
    ) -> Pipeline[T]:
        """Give this process its part of every epoch: disjoint parts of equal length.

        Before ``shuffle`` a rank's part is fixed (for a cache on each host); after it, parts are
        drawn again every epoch. With a stream, rank ``r`` takes every ``world_size``-th example.
        Without a seed, all ranks take rank 0's at the first ``iter()``.

        Args:
            rank, world_size: this process's rank, and the number of ranks; by default those of
                ``torch.distributed``, ``jax.distributed`` or Ray Train, else 0 and 1.
            mesh: a whole torch ``DeviceMesh``; ranks along a model's dimensions get equal batches.
            mesh_dims: the dimensions that split the data, if their names ("dp", ...) do not say so.
            remainder: what becomes of examples that do not divide by the ranks. ``"drop"`` leaves
                them out, others in each epoch. ``"uneven"`` keeps them: the lengths of ranks may
                differ by one. For evaluation ``"pad"`` keeps each once over all ranks, and repeats
                the last one until all ranks have equally many rows (``"pad_full"``: whole batches).
                Rows gathered from all ranks are then in the order of the data, the padding last;
                ``last.valid`` is False for padding.
            mask: add ``last.valid`` to padded batches as a field ``bool [n]`` of this name. A dict
                gets the key, a tuple one element more; anything else becomes ``(batch, mask)``.

        Raises ValueError on a loader, for a launcher with several processes but no process group,
        and for a mesh with unclear names; ``iter()`` raises if ranks differ, or one is missing.
        """
        return self._then(Shard.of(rank, world_size, mesh, mesh_dims, remainder, mask))

    def balance(
        self, sizes: Any = None, *, cost: Callable[[Any], Any] | None = None
    ) -> Pipeline[T]:
        """Deal the examples of each global batch so that ranks have equal work, and equally many.

        It stands behind ``shuffle`` and ``shard``. A rank's rows come longest first. Behind
        ``pack(length, sizes=)`` it deals packed sequences, by the sum of what their documents cost.

        Args:
            sizes: numbers ``[n]``, one for each example of the source (its length, in general), the
                field that has them, or a function for ``sizes()``, which reads all examples now;
                None behind ``pack``.
            cost: called once with these numbers, as an array; returns what examples cost, such as
                ``lambda n: n + n * n / 4096``. Behind ``pack`` it gets the lengths from 0 on, and
                the default is ``n * n``.

        Raises ValueError or TypeError for numbers that do not fit, and ValueError over streams,
        mixtures (but behind ``pack``), and behind ``filter``, ``echo`` or ``batch``.
        """
        return self._then(Balance.of(self._numbers(sizes), cost))

    def select(self, which: Any) -> Pipeline[T]:
        """Keep some examples of a source, by number; nothing is read. In the source's order.

        Numbers are always those of the source, also after another ``select``: in errors, in
        ``pipeline.name_of(number)``, and here. For another order, or repeats: ``order``.

        Args:
            which: numbers ``[k]``, a mask ``bool [n]``, or ``fn(number, name)``, called once for
                each example, now. 10^8 examples take 13 MB by mask.

        Raises TypeError or ValueError for an invalid or empty choice; ValueError after ``shuffle``,
        ``shard`` or ``filter``, on streams and loaders, and on a mixture: select in its parts.
        """
        return self._then(Select(which))

    def split(
        self, *fractions: float, seed: int = 0, stratify: Any = None, groups: Any = None
    ) -> tuple[Pipeline[T], ...]:
        """Split the examples at random into parts: disjoint, and all of them; nothing is read.

        ``train, test = p.split(0.9)``. For cross-validation: ``folds``.

        Args:
            fractions: one for each part; a single one is that of the first of two parts.
            seed: with the same one, the parts are the same, whatever the pipeline's seed is.
            stratify: labels ``[n]`` by number, ``fn(number, name)``, or the field that has them:
                each part then gets its fraction of each label, rounded down or up.
            groups: the group of each, such as its patient, given likewise: no group is split.

        Raises TypeError or ValueError for other fractions, and if a part would be empty; else as
        ``select``.
        """
        return tuple(map(self._then, parts_of(self.chain, fractions, seed, stratify, groups)))

    def folds(
        self, k: int, *, seed: int = 0, stratify: Any = None, groups: Any = None
    ) -> list[tuple[Pipeline[T], Pipeline[T]]]:
        """Return ``k`` pairs (train, validation) for cross-validation; nothing is read.

        Each example is in one validation part, and in the training parts of all other pairs.

        Args:
            k: how many folds, at least 2.
            seed, stratify, groups: as in ``split``.

        Raises as ``split`` does.
        """
        folds = folds_of(self.chain, k, seed, stratify, groups)
        return [(self._then(train), self._then(valid)) for train, valid in folds]

    def take(self, n: int, *, seed: Int = None) -> Pipeline[T]:
        """Keep the first ``n`` examples of every epoch, or ``n`` that a seed draws.

        The others are not read. Before ``shuffle`` they are the same in every epoch (to try things
        out, or to overfit); after it, they differ in each epoch. After ``shard`` each rank has
        ``n``. Examples that ``max_errors=`` leaves out later count.

        Args:
            n: how many.
            seed: draw them from all examples, always the same for a seed. The first ones of a
                folder are often all of one class.

        Raises ValueError after ``filter``, ``echo`` or ``batch`` and on a loader: ``.steps(n)``
        ends an epoch after ``n`` batches. With a seed as ``select``.
        """
        if seed is not None:
            return self._then(sample_of(self.chain, n, seed))
        taken = Take.of(n)
        taken.warn_of_one_class(self.chain)
        return self._then(taken)

    def skip(self, n: int) -> Pipeline[T]:
        """Drop the first ``n`` examples of every epoch: the opposite of ``take(n)``.

        So ``p.take(80), p.skip(80)`` is a split. Only a stream reads them. Raises as ``take`` does,
        and on a mixture. To start the next epoch after its first batches, use ``resume_at``.
        """
        return self._then(SkipFirst.of(n))

    def with_index(self, field: str = "id") -> Pipeline[Any]:
        """Add the number of each example in the source to it, as a field of this name.

        A dict gets the key, a tuple one element more; anything else becomes ``(example, number)``.
        Batches then have ``int64 [n]``: see ``name_of`` and ``example``. Over a mixture, numbers go
        on from part to part.

        Raises ValueError on streams and loaders, after a ``map``, and if the field exists.
        """
        return self._derive(self.chain.with_index(field), f"with_index({field!r})")

    def filter(
        self, fn: Callable[[Any], Any], *, on: On = None, max_errors: Err = None
    ) -> Pipeline[T]:
        """Keep the examples for which a deterministic function is true.

        Dropped examples are read, and prepared up to here, but do not count; ``len()`` is then not
        known.

        Args:
            fn: called as ``fn(x)`` in workers; a result that is not true (also None) drops ``x``.
            on, max_errors: as in ``map``.

        Raises TypeError if ``fn`` does not take one argument, ValueError after ``batch``.
        """
        return self._then(Filter.of(fn, on, max_errors))

    @overload
    def map(
        self,
        fn: Callable[[T], U],
        *,
        on: None = None,
        max_errors: Err = None,
        progress: Literal[False] = False,
    ) -> Pipeline[U]: ...

    @overload
    def map(self, fn: Callable[[Any], Any], *, on: On, max_errors: Err = None) -> Pipeline[Any]: ...

    @overload
    def map(
        self, fn: Draws, *, on: On = None, max_errors: Err = None, progress: bool
    ) -> Pipeline[Any]: ...

    def map(
        self,
        fn: Callable[..., Any],
        *,
        on: On = None,
        max_errors: Err = None,
        progress: bool = False,
    ) -> Pipeline[Any]:
        """Apply a deterministic function to every example, or to every batch after ``batch``.

        Args:
            fn: called as ``fn(x)``; its result, which must not be None, replaces ``x``.
            on: its field, by name, key or position, or a list of fields, which come in a tuple and
                go in one; by default the whole example.
            max_errors: how many it may skip (see ``from_dataset``); by default the pipeline's.
            progress: call ``fn(x, progress)`` with a ``stoker.types.Progress``: the epoch of the
                data, and how much of it comes before the example's own place, from 0 to 1. It is
                the same on all ranks, in all workers and after a resume.

        Raises TypeError if ``fn`` does not take one argument (two, with ``progress``), LookupError
        for a missing field, ValueError for ``progress`` over streams and after ``batch``.
        """
        return self._then(Map.of(fn, on, max_errors, is_random=False, progress=progress))

    @overload
    def random_map(
        self, fn: Callable[[T, Any], U], *, on: None = None, max_errors: Err = None
    ) -> Pipeline[U]: ...

    @overload
    def random_map(
        self, fn: Draws, *, on: On, max_errors: Err = None, repeats_only: bool = False
    ) -> Pipeline[Any]: ...

    @overload
    def random_map(
        self, fn: Draws, *, max_errors: Err = None, repeats_only: bool
    ) -> Pipeline[Any]: ...

    @overload
    def random_map(
        self,
        fn: Callable[[Any, Any, Any], Any],
        *,
        on: On = None,
        max_errors: Err = None,
        repeats_only: bool = False,
        progress: Literal[True],
    ) -> Pipeline[Any]: ...

    def random_map(
        self,
        fn: Callable[..., Any],
        *,
        on: On = None,
        max_errors: Err = None,
        repeats_only: bool = False,
        progress: bool = False,
    ) -> Pipeline[Any]:
        """Apply a function that draws random numbers: after an echo, again for every use.

        Args:
            fn: called as ``fn(x, rng)`` with a ``numpy.random.Generator``, valid during the
                call only (after ``.to``, a ``torch.Generator`` on that device, or a JAX key). The
                random numbers depend on seed, epoch, example and use, never on workers. Its result
                must not be None.
            on, max_errors: as in ``map``.
            repeats_only: leave first uses unchanged; after an echo, before ``batch``.
            progress: call ``fn(x, rng, progress)``, as in ``map``.

        Raises TypeError if ``fn`` takes no ``rng``, LookupError for a missing field.
        """
        made = Map.of(
            fn, on, max_errors, is_random=True, repeats_only=repeats_only, progress=progress
        )
        return self._then(made)

    def scan(
        self,
        fn: Callable[[Any, Any], tuple[Any, Any]],
        state: Any,
        *,
        dump: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
    ) -> Pipeline[Any]:
        """Call a function with a state on one example after another, in order, for any workers.

        Each (data) epoch begins with a copy of ``state``; a resume goes on exactly. Of several
        ranks each scans its own part. ``len()`` is then not known, as after ``filter``.

        It makes one call at a time, in this process, while nothing else is planned: put all other
        work in maps before it. The state is dumped for at most 3 % of the time; a resume calls
        ``fn`` again from a dump on.

        Args:
            fn: called as ``fn(state, example)`` by one thread at a time; returns the next state
                (the old one, changed, or another), and an example or ``stoker.DROP``. It must be
                deterministic, and keep nothing outside its state. No ``max_errors=`` covers it.
            state: a value of dicts with text as keys, lists, text, numbers, booleans, None.
            dump, load: for other states: ``dump`` turns a state into values for JSON, or bytes, and
                ``load`` turns these into a state: ``dump=list, load=set``. Examples must then not
                refer to objects that later calls change.

        Raises TypeError for another ``fn`` or a state that cannot be saved; ValueError after
        ``echo``, ``pack`` or ``batch``, and on a loader. No ``cache`` or ``shuffle`` follows.
        """
        return self._then(Scan.of(fn, state, dump, load))

    @overload
    def pack(
        self, length: int, *, fields: None = None, fit: Literal["split", "best"] = "split",
        window: int = 1024, sizes: Any = None, labels: None = None,
    ) -> Pipeline[Packed]: ...  # fmt: skip

    @overload
    def pack(
        self, length: int, *, fields: str | int | Sequence[str | int],
        fit: Literal["split", "best"] = "split", window: int = 1024, sizes: Any = None,
        labels: str | int | None = None,
    ) -> Pipeline[dict[Any, Any]]: ...  # fmt: skip

    def pack(
        self,
        length: int,
        *,
        fields: str | int | Sequence[str | int] | None = None,
        fit: Literal["split", "best"] = "split",
        window: int = 1024,
        sizes: Any = None,
        labels: str | int | None = None,
    ) -> Pipeline[Any]:
        """Join documents of any length into full sequences.

        Of arrays ``[n]`` of integers, or lists, it makes ``(tokens, segments, positions)``, each
        ``[length]``. Of dicts and tuples it makes dicts: of each field that is packed ``[length,
        ...]``, of each other field a list with the documents' values, and ``segments`` and
        ``positions``. ``segments`` numbers the documents in a sequence from 0 on, ``positions``
        their tokens, both ``int32``; padding is last, in segment -1. A use is a full sequence.

        Args:
            length: of a sequence, in tokens.
            fields: the names of the arrays ``[n, ...]`` that are packed together; integers become
                ``int64``.
            fit: ``"split"`` cuts documents where a sequence is full, and drops the last tokens of
                an epoch; ``"best"`` keeps documents whole unless they are longer than ``length``,
                and pads with zeros.
            window: how many documents wait, for the best fit.
            sizes: the length of each example of the source, or the field that has it. Then epochs
                are planned: ``len()`` is known, global batches are the same for any number of
                ranks, and ``.balance()`` may follow.
            labels: the field in which the first token of each segment, and padding, is -100; made
                of the first of ``fields`` if the documents have no such field.

        Raises ValueError after ``batch``, after another ``pack``, or on a loader; with ``sizes``
        also where examples may be left out or repeated before it.
        """
        return self._then(Pack.of(length, fields, fit, window, self._numbers(sizes), labels))

    def late(self, max_batches: int) -> Pipeline[T]:
        """Let examples that are not ready when their batch is due come in a later one.

        Another example takes the place. Put it right before ``batch``. While nothing is late, no
        batch changes. ``record()`` returns which examples were, for ``replay``.

        Args:
            max_batches: by how many batches an example may move on at most.

        Raises ValueError over streams, after ``filter``, ``echo``, ``scan`` and ``pack``, with skip
        budgets, and where no ``batch`` follows.
        """
        return self._then(Late.of(max_batches))

    @overload
    def batch(
        self: Pipeline[Rows], batch_size: int, *, drop_last: bool = False, collate: None = None
    ) -> Pipeline[Rows]: ...

    @overload
    def batch(
        self, batch_size: int, *, drop_last: bool = False, collate: Callable[[list[T]], U]
    ) -> Pipeline[U]: ...

    @overload
    def batch(
        self, batch_size: int, *, drop_last: bool = False, collate: None = None
    ) -> Pipeline[Any]: ...

    def batch(
        self,
        batch_size: int,
        *,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Pipeline[Any]:
        """Stack examples into batches.

        Tuples, dicts, dataclasses and named tuples keep their form. Their arrays and numbers become
        arrays ``[batch_size, ...]`` of the same dtype (all tensors, if one is a torch tensor);
        strings and bytes become lists. Numbers of several types (``3`` beside ``np.int32(3)``,
        ``2.5`` or True) become ``int64``, ``float64`` or ``complex128``. Sparse tensors of layout
        ``sparse_coo`` become one. The arrays are yours to write into; freed memory is used again.

        Args:
            batch_size: examples in a batch; the last one of an epoch may have fewer.
            drop_last: leave out a last batch with fewer.
            collate: called with the list of examples instead; its result is the batch.

        Raises TypeError or ValueError for other arguments; ValueError after another batch.
        """
        return self._then(Batch.of(batch_size, drop_last, collate))

    def batch_by_tokens(
        self,
        max_tokens: int,
        sizes: Any,
        *,
        key: Any = None,
        multiple_of: Int = None,
        max_rows: Int = None,
        padded: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Pipeline[Any]:
        """Make batches of about equal work from examples of different lengths.

        Batches are planned ahead of each epoch: examples of about equal size go together, different
        ones in each epoch; all ranks take equally many steps. ``len()`` is that of the current
        epoch. Stacks as ``batch`` does; ``collate=stoker.collate.pad()`` pads.

        Args:
            max_tokens: the most tokens in a batch: its rows times the longest, with padding.
            sizes: of examples: whole numbers ``[n]`` in the order of the source, the field that
                has them, or a function for ``sizes()``, which reads all examples now.
            key: numbers or text ``[n]``, a field, or a function likewise: examples of one batch
                have equal keys.
            multiple_of: each row is as long as the longest, rounded up to a multiple of this.
            max_rows: the most examples in a batch.
            padded: False: ``max_tokens`` is the sum of the sizes, as without padding.
            collate: as in ``batch``.

        Raises ValueError after ``filter``, ``echo``, ``scan`` or ``pack``, over streams, and when
        iterated for an example larger than a batch; TypeError for other arguments.
        """
        numbers = self._numbers(sizes), self._numbers(key)
        limits = multiple_of, max_rows, padded
        return self._then(PlannedBatch.by_tokens(max_tokens, *numbers, *limits, collate))

    def bucket(
        self, batch_size: int, key: Any, *, collate: Callable[[list[Any]], Any] | None = None
    ) -> Pipeline[Any]:
        """Make batches whose examples have equal keys: images of one shape, questions of a topic.

        Planned ahead of each epoch as ``batch_by_tokens`` does, and refused where that is.

        Args:
            batch_size: the most examples in a batch; the last ones of a key may be fewer.
            key: numbers or text ``[n]`` in the order of the source, the field that has them, or a
                function for ``sizes()``, which reads all examples now.
            collate: as in ``batch``.
        """
        return self._then(PlannedBatch.by_key(batch_size, self._numbers(key), collate))

    def _numbers(self, given: Any) -> Any:
        return self.sizes(given) if callable(given) else given

    def sizes(self, fn: Callable[[Any], Any] = len) -> NDArray[Any]:
        """Return a number for each example of the source, in its order: one pass by all workers.

        For ``batch_by_tokens``, ``bucket``, ``balance`` and ``mix(by=)``; save the result. Maps and
        caches of this pipeline come first; its order, parts and batches do not count. Of documents
        of token files lengths are known: nothing is read.

        Args:
            fn: called as ``fn(x)`` with each example; returns a number.

        Returns ``int32 [n]``, ``int64`` for larger numbers, or ``fn``'s own dtype if not whole.
        Raises ValueError after ``filter``, ``echo`` or ``random_map``, and over a stream.
        """
        if fn is len and (known := self.chain.lengths()) is not None:
            return known.copy()
        # Each of several ranks measures all, which is meant.
        alone = Shard.of(0, 1, None, None, "drop", None)
        whole = self.chain.for_measuring().with_inserted({0: lambda _: alone})
        batches: Any = Pipeline[Any](whole).map(fn).batch(MEASURED)
        return measured(list(batches))

    def echo(
        self,
        factor: Factor = "auto",
        *,
        max_factor: int | None = None,
        min_distance: int | None = None,
        pool: int | str | None = None,
    ) -> Pipeline[T]:
        """Use items more than once: data echoing (Choi et al., arXiv 1907.05550).

        Its place decides the kind. Before ``random_map``: *example echoing before
        augmentation*; between it and ``batch``: *example echoing after augmentation*; after
        ``batch``: *batch echoing*; after ``to``: batch echoing on the device.

        With ``"auto"`` the factor follows the stall. A fresh item is used as soon as it is ready.
        While nothing fresh is ready, the least recently used item is repeated, unless it was used
        less than ``min_distance`` steps ago or ``max_factor`` times. Only without such an item the
        consumer waits. ``record()`` returns the decisions, and ``replay`` repeats them.

        Args:
            factor: ``"auto"``, or the mean uses of each fresh item, at least 1, or a ``Fraction``.
            max_factor: with ``"auto"``, the most uses of one item, at least 2; by default 8 for
                example echoing before augmentation, and 4 elsewhere.
            min_distance: with ``"auto"``, the fewest steps between two uses of an item, at least 2;
                by default 8. Fewer in the first 48 steps, and if the pool holds fewer batches.
            pool: the items kept, in examples (after ``batch``: batches) or bytes (``"2GiB"``; less,
                with a warning, if memory is short); by default 16 batches, or 10 % of memory.

        Raises TypeError or ValueError for a factor below 1, a pool too small for a batch,
        conflicting arguments, or a second echo.
        """
        stage = Echo.of(factor, max_factor, min_distance, pool)
        return self._derive(self.chain, "echo(1)") if stage is None else self._then(stage)

    def cache(
        self,
        limit: int | str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        keep: bool | None = None,
        version: str | None = None,
        cluster: str | Sequence[str] | None = None,
        insecure: bool = False,
    ) -> Pipeline[T]:
        """Keep examples and never evict them, so that later epochs do not read or make them again.

        After the source it keeps raw bytes, after a ``map`` its results. Examples enter as they
        come until the limit is reached; then nothing enters or leaves (MinIO caching, VLDB 2021,
        section 6.1). Processes of this host share the store of the same data. No batch changes.

        ``.cache("auto")`` chooses the place: it makes up to 64 examples now, for at most about 5 s,
        and puts the cache where it saves most time, after the source or after one of the maps and
        filters up to the first random stage, echo or batch. ``print(pipeline)`` shows where, and
        why. Where no place would save anything there is a warning, and no cache.

        Args:
            limit: bytes (``"64GiB"``) or a share of usable memory (``"50%"``; with ``path`` of the
                free disk); by default, and with ``"auto"``, half (four fifths).
            path: a folder on a local disk, in front of slower storage; by default in memory.
            keep: whether it stays after its last user ends; by default only with ``path``.
            version: identifies data and functions that stoker cannot identify itself: your maps,
                datasets, arrays, servers without versions. Jobs with the same version share the
                store; without a version a job shares only with itself.
            cluster: spread it over nodes: ``"ray"``, ``"torchrun"``, or cache servers' addresses.
                Not with ``"auto"``: nodes could choose different places.
            insecure: do not encrypt the traffic between nodes: only on a network that you trust.

        Raises ValueError on streams and loaders, after random maps, echoes, batches and another
        cache; TypeError or ValueError for other wrong arguments; and, before the first example
        enters, StageError if it differs each time it is made.
        """
        if isinstance(limit, str) and limit == "auto":
            if cluster is not None:
                raise CombinationError(
                    '.cache("auto") chooses its place by what this process measures, and nodes '
                    "could choose different ones: put .cache(limit, cluster=...) at a place"
                )
            chain = with_best_cache(self.chain, version=version, path=path, keep=keep)
            return self._derive(chain, "cache")
        limit = "auto" if limit is None else limit
        stage = CacheStage.of(self.chain, limit, version, cluster, insecure, path=path, keep=keep)
        return self._then(stage)

    def workers(
        self,
        n: int,
        *,
        kind: str | None = None,
        persistent: bool = False,
        ahead: int | str | None = None,
        timeout_s: float | None = None,
        ray_options: Mapping[str, Any] | None = None,
        insecure: bool = False,
    ) -> Pipeline[T]:
        """Set the number of workers, and where your Python code runs.

        The default is as many workers as usable cores, of each eight cores seven; while they mostly
        wait up to 64 threads, or 16 processes.

        stoker's own functions and sources run in threads. Python code of yours (datasets,
        functions, ``collate``) runs in the loop's thread where a batch takes under a millisecond,
        else in worker processes. What you declare with ``stoker.thread_safe`` runs in threads.

        Args:
            n: an upper bound, 0 for none. Of processes and actors, the number.
            kind: ``"thread"``: all code runs in threads, which is your word that they may call it
                at once. ``"process"``: all code runs in processes. ``"ray"``: in actors of the Ray
                cluster, placed by ``ray_options`` (default ``{"num_cpus": 1}``).
            persistent: keep the processes for later epochs, which is your word that neither the
                dataset nor the functions change. Otherwise each epoch starts new ones, which see
                what your program holds then.
            ahead: how far workers may be ahead of you at most, in batches, or in bytes
                (``"4GiB"``); without workers nothing is ahead.
            timeout_s: how many seconds a stage may take for one example. After a quarter of them a
                warning names it and shows where its worker is. After all of them it fails with
                TimeoutError: a process is replaced, and ``max_errors=`` may skip the example; a
                thread cannot be ended, so the run fails.
            insecure: do not encrypt the traffic to actors: only on a network that you trust.
        """
        if self.chain.source.yields_batches:
            raise CombinationError("a loader has workers of its own: set them there (num_workers=)")
        workers = Workers.of(
            n,
            kind,
            persistent=persistent,
            ahead=ahead,
            timeout_s=timeout_s,
            ray_options=ray_options,
            insecure=insecure,
        )
        return self._derive(replace(self.chain, workers=workers), f"workers({n})")

    def steps(self, n: int) -> Pipeline[T]:
        """End an epoch after ``n`` batches, so that ``len()`` is known under ``.echo("auto")``.

        The remaining examples are not used in that epoch. Without batches, ``n`` counts examples.
        If an epoch has fewer, a warning says so; it is an error if other ranks may have more and
        would wait (if the number is not known before an epoch's end).
        """
        return self._derive(self.chain.with_steps(n), f"steps({n})")

    def repeat(self) -> Pipeline[T]:
        """Start the next pass over the data at the end of each, so that epochs have ``n`` steps.

        This holds for any echoing factor and any filter. An epoch of ``.steps(n)`` ends after ``n``
        batches, and the next one continues there. ``epoch``, ``progress`` and ``counts`` describe
        the data: ``epoch`` counts passes. Without ``.steps(n)`` the first epoch never ends. The
        last batch of a pass may be short, unless ``.batch(n, drop_last=True)`` drops it.
        """
        return self._derive(self.chain.repeat(), "repeat()")

    def to_torch(self, device: Any = "cpu", *, out: Any = None) -> Pipeline[Any]:
        """Hand out torch tensors on a device, and copy the next batch meanwhile.

        On the CPU they share the arrays' memory.

        Args:
            device: a ``torch.device``, or its name, such as ``"cuda"``.
            out: tensors on that device, with the structure, shapes and dtypes of a batch. Each
                batch is copied into them, and they are what is handed out: the memory that a CUDA
                graph reads. The copy waits, in your current stream, for what you began before. The
                last stage alone may have it.

        Example::

            images = torch.empty(32, 3, 224, 224, device="cuda")
            for images in train.batch(32, drop_last=True).to_torch("cuda", out=images):
                graph.replay()

        Raises ImportError without torch, ValueError before ``batch``, TypeError for other objects.
        ``iter()`` raises RuntimeError if the device does not exist, so that a pipeline can be built
        and printed anywhere; ``next()`` raises StageError for a batch that does not fit ``out``.
        """
        return self._then(To.of_torch(device, out))

    def to_jax(self, device: Any) -> Pipeline[Any]:
        """Hand out JAX arrays on a device or a sharding, and copy the next batch meanwhile.

        Args:
            device: a ``jax.Device``; or a ``jax.sharding.Sharding``, where a batch is this
                process's part of a global one.

        Raises ValueError before ``batch``, TypeError for other objects.
        """
        return self._then(To.of_jax(device))

    def record(self) -> dict[str, Any]:
        """Return what ``.echo("auto")``, or ``.late()``, decided so far, ready for JSON.

        Raises ValueError without either.
        """
        return self._cursor.record()

    def replay(self, record: Mapping[str, Any]) -> Pipeline[T]:
        """Repeat the run that a record is of, exactly, for any number of workers::

            again = build().replay(train.record())

        The sizes of pools and, if you give none, the seed are the record's. If that run was left in
        the middle of an epoch, iteration raises StateError there; if it was resumed, load the state
        that it went on from.

        Raises StateError for a damaged record; ``iter()`` does so if it is another pipeline's.
        """
        return self._derive(self.chain.replaying(record), "replay(...)")

    def name_of(self, number: int) -> str:
        """Return the name of an example: ``"cat/01.jpg"``, ``"a.parquet, row 354"``.

        It is the same on every host with the same data; in a mixture it begins with the part.
        Raises LookupError if there is no such example, ValueError on streams and loaders.
        """
        return name_of(self.chain, number)

    def labels(self, field: str | int | None = None) -> NDArray[Any]:
        """Return the label of each example of the source ``[n]``, in its order: numbers or texts.

        Nothing else is read. For weights, and to count the classes.

        Example: ``data.sample(1 / np.bincount(labels)[labels])``

        Args:
            field: a column of a table, of local Parquet files, or of a Hugging Face dataset. By
                default the classes of a folder, or the only ``ClassLabel`` of a dataset.

        Raises TypeError if the source has no such labels, ValueError on streams and loaders.
        """
        return labels_of(self.chain, field)

    def example(self, number: int, *, epoch: Int = None, place: Int = None, use: int = 1) -> Any:
        """Make a single example again, as it goes into a batch, with the same random draws.

        Stages up to ``batch``, ``pack`` or ``scan`` are called here, without the cache. Random maps
        and other code of yours draw as they did in that epoch.

        Args:
            number: of the example in the source (``.with_index()`` puts it into batches).
            epoch: by default the current one.
            place: where it stands in the epoch, over all ranks; by default its first place on this
                rank, which is searched for: 14 to 35 ns for each example before it. An
                ``.order(fn)`` is asked again for that.
            use: the number of its use, from ``last.number``.

        Raises LookupError if the epoch has no such example, or a filter leaves it out; ValueError
        on streams and loaders; the errors of the stages.
        """
        epoch = self.epoch if epoch is None else epoch
        return example_of(self.chain, number, epoch, place, use)

    def peek(self) -> T:
        """Return the next output without moving the pipeline: iteration returns it again.

        It is made alone, without workers. Raises ValueError on streams and loaders, where ranks
        decide together what comes next, and for an empty epoch.
        """
        output: T = next_output(self._cursor)
        return output

    if not TYPE_CHECKING:  # else any name would be right for a type checker

        def __getattr__(self, name):
            """Say what stoker calls what other libraries, or a slip of the pen, call so."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises again what a property raised
            missing = f"a pipeline has no attribute {name!r}"
            raise AttributeError(missing + hint(name, METHODS, dir(type(self))))

    def stats(self) -> Stats:
        """Return statistics of the running epoch, or else of the last one; ``print`` shows them."""
        return self._cursor.stats()

    def metrics(self, prefix: str = "stoker/") -> dict[str, float]:
        """Return the statistics as one flat dict of numbers, for experiment trackers.

        Names are those of ``stats()``, for the epoch so far, with ``cache_`` before those of a
        cache. Names that end in ``_total`` never fall: they count over all epochs. Numbers of
        absent parts, such as a cache or a feed, are left out. May be called from any thread.

        Example: ``wandb.log(train.metrics(), step=step)``

        Args:
            prefix: stands before each name.
        """
        return as_metrics(self.stats(), self.counts, prefix)

    def __str__(self) -> str:
        return describe(self._cursor.next_chain, self._cursor.pool_size)

    def __repr__(self) -> str:
        return f"<stoker.Pipeline {self.chain}>"


explain_calls(Pipeline)
