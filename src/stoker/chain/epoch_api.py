"""The position of a pipeline, as users, frameworks and schedules ask for it and set it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, NoReturn

from stoker.basics.warn import warn
from stoker.chain.chain import Chain
from stoker.chain.cursor import Cursor
from stoker.chain.iterator import DeferredIterator, PipelineIterator, T
from stoker.errors import StateError, StokerError, raised_here
from stoker.frameworks.queries import (
    calling_loop,
    framework_with_one_state,
    unwrap_state,
    wrap_state,
)
from stoker.stats import Counts, Uses

if TYPE_CHECKING:
    from stoker.frameworks.torch_loader import PipelineLoader


class UnusedCheck:
    """Warns if a pipeline that a method returned was dropped unused: pipelines are immutable, so
    ``train.shuffle()`` without an assignment does nothing.

    ``is_used``: whether the pipeline was asked for anything.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._last: UnusedCheck | None = None
        self._call = ""
        self._pipeline: weakref.ref[Any] | None = None

    def note_derived(self, check: UnusedCheck, pipeline: Any, call: str) -> None:
        """Note the pipeline, with its own check, that a method, ``call``, made of this one."""
        self._last = check
        check._call, check._pipeline = call, weakref.ref(pipeline)

    def warn_of_dropped(self) -> None:
        """Warn, once, if the last pipeline made of this one is gone and was never used."""
        last, self._last = self._last, None
        if last is None or last._pipeline is None or last._pipeline() is not None or last.is_used:
            return
        warn(
            f".{last._call} changes nothing in the pipeline that is iterated here: it returned a "
            "new one, which was dropped. Keep it (train = train.shuffle())"
        )

    def __reduce__(self) -> tuple[type[UnusedCheck], tuple[()]]:
        return UnusedCheck, ()  # a copy of a pipeline begins anew, and references cannot be pickled


class EpochApi(Generic[T]):
    """The methods and attributes of a pipeline about its epochs, position and states."""

    _position: Cursor
    _unused_check: UnusedCheck

    @property
    def _cursor(self) -> Cursor:
        self._unused_check.is_used = True
        return self._position

    @property
    def chain(self) -> Chain:
        """The frozen value behind it: source, stages, seed."""
        return self._cursor.chain

    def __iter__(self) -> PipelineIterator[T]:
        """Start the next epoch, or continue a loaded one."""
        self._unused_check.warn_of_dropped()
        cursor = self._cursor
        if calling_loop().begins_later:
            return DeferredIterator(cursor.begin, cursor.count)
        try:
            return cursor.begin()
        except StokerError as error:
            raise raised_here(error) from error.__cause__

    if not TYPE_CHECKING:  # a type checker says by itself that it is no iterator

        def __next__(self) -> NoReturn:
            """Raise TypeError: each ``iter()`` begins an epoch, and ``next()`` takes one of it."""
            raise TypeError(
                "a pipeline is no iterator: batches = iter(pipeline) begins an epoch, "
                "next(batches) takes its next batch. pipeline.peek() shows that and leaves it there"
            )

        def __add__(self, _: object) -> NoReturn:
            """Raise TypeError: ``+`` joins datasets of torch."""
            raise TypeError("stoker.concat([a, b]) joins pipelines")

    def __len__(self) -> int:
        """Return the batches (or examples, without batches) of the running epoch, or the next.

        Raises TypeError if the number is not known in advance: for streams, loaders without a
        length, filters, ``max_errors=`` and ``.echo("auto")``; unless ``.steps(n)`` is set.
        """
        return self._cursor.count()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle a pipeline: the copy has a cursor of its own, at the same position."""
        state = None if self._cursor.is_untouched else self.state_dict()
        return type(self), (self.chain,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)

    def __bool__(self) -> bool:
        return True  # else it would ask for the length, which may not be known

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise TypeError: a pipeline is iterated, and takes the place of a loader."""
        raise TypeError(
            "a pipeline has no indices, so it is no dataset for a DataLoader or a Trainer: iterate "
            "the pipeline (for batch in pipeline), or use pipeline.as_dataloader() as the loader "
            "(return it from get_train_dataloader of a Trainer). To select a part of the data, use "
            ".take() or .shard()"
        )

    def as_dataloader(self) -> PipelineLoader:
        """Return this pipeline as a ``torch.utils.data.DataLoader``, for what takes nothing else.

        Both have one position: epochs, states and statistics are the pipeline's. Accelerate and the
        Hugging Face ``Trainer`` take it as it is: shard the pipeline, and move batches with
        ``.to_torch(device)``.

        Raises ImportError without torch.
        """
        try:
            from stoker.frameworks.torch_loader import PipelineLoader
        except ImportError as error:
            needs = "as_dataloader() needs PyTorch: pip install torch"
            raise ImportError(needs) from error
        return PipelineLoader(self)

    @property
    def epoch(self) -> int:
        """The epoch that is running, or was left early; after a whole epoch, the next one."""
        return self._cursor.epoch

    @property
    def progress(self) -> float:
        """The share of the epoch's fresh examples handed out so far, from 0 to 1.

        Under ``.steps(n)`` the share of the steps, if that is larger. Raises TypeError for streams
        and loaders without a length, unless ``.steps(n)`` is set.
        """
        return self._cursor.progress()

    @property
    def counts(self) -> Counts:
        """Fresh examples, uses and steps handed out in all epochs so far."""
        return self._cursor.before + self._cursor.of_epoch()

    @property
    def last(self) -> Uses:
        """For each example of the last output: the number of its use, and steps since another."""
        return self._cursor.last_uses()

    @property
    def seed(self) -> int:
        """The seed of shuffling, echoing and random maps; of ranks, see ``shard``."""
        return self.chain.seed

    @property
    def class_names(self) -> list[str]:
        """The class names of a folder or a dataset, in the order of their labels."""
        return list(self.chain.source.attribute("class_names"))

    def resume_at(self, n: int) -> None:
        """Have the next ``iter()`` begin behind the first ``n`` batches of its epoch.

        If a state was loaded, those behind which it was saved are counted. Nothing is read for it,
        whatever ``n`` is, without filters, ``max_errors=`` and echoes, or with one echo of a fixed
        factor whose pool has a known size (``pool=`` of items, or a later epoch), whose draws are
        then repeated: some microseconds each. Else the batches are made and dropped, by ``iter()``.

        Raises ValueError for a negative number; ``iter()`` does for more batches than the epoch is
        known to have, for fewer than a loaded state is behind, and under ``.echo("auto")``, where
        only a state tells what is left.
        """
        self._cursor.resume_at(n)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; a live iterator is closed. A loader is told, if it can be.

        Right after ``load_state_dict``, the epoch of that state keeps its position. Under
        ``.repeat()`` epochs are those of ``.steps(n)``. Raises ValueError where only a state leads
        there: some under ``.repeat()``, and far ones of a mixture whose weights change.
        """
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the last batch that was yielded, ready for JSON (see below).

        At most a byte for each item in a pool, and 4 KB. Loaded into a pipeline that is
        built alike, it makes the next iteration continue right behind that batch.

        It has the same keys at every step. ``epoch``, ``step`` (the batches of that epoch that were
        handed out) and ``finished`` (whether an epoch has just ended) are for people; the rest is
        one text.

        Over a loader that has a state of its own (``StatefulDataLoader``) that is nested in it as
        it is, tensors included (save it with ``torch.save``); ``.echo("auto")`` then goes on with
        an empty pool.

        Behind the last batch of an epoch, as far as ``len()`` tells, it is the state in which the
        next epoch begins. Under a wrapper that reads ahead of training, see ``acknowledge``.

        ``torch.distributed.checkpoint`` is given one value, which any number of ranks loads: the
        state, or where ranks' states differ the list of all. Then all ranks must take part.

        Raises StateError in the middle of an epoch over a stream or another loader, which cannot be
        made again; under Lightning without a length or an acknowledgement, because it has read a
        batch ahead that would be lost; and under Lightning and Accelerate, which keep one state for
        all ranks, where filters or ``max_errors=`` may leave those unequal.
        """
        keeper = framework_with_one_state() if self.chain.ranks_differ else None
        if keeper is not None:
            raise StateError(
                f"{keeper} keeps the state of one rank for all, and here the states of ranks "
                "differ, by filters, max_errors=, .scan(), .pack(), .late() or remainder='uneven'. "
                "Leave examples out before sharding, give .pack() its sizes=, or save each rank's "
                "state_dict() yourself"
            )
        chain = self.chain
        return wrap_state(self._cursor.save(), chain.rank_world[0] if chain.ranks_differ else None)

    def acknowledge(self, batches: int = 1) -> None:
        """Say that training has finished with so many more of the batches of this iteration.

        For wrappers that read ahead: from the first call on, ``state_dict()`` is the state behind
        the last batch that was acknowledged, so that those which were handed out and not trained on
        come again after a resume. Call it behind each training step, up to 63 batches late and
        before the next ``iter()``; and ``acknowledge(0)`` before the first, if an epoch may be
        shorter than what is read ahead.

        Raises ValueError for more batches than were handed out.
        """
        self._cursor.acknowledge(batches)

    def load_state_dict(
        self, saved: dict[str, Any] | list[dict[str, Any]], *, elastic: bool = True
    ) -> None:
        """Go to a saved state; the next ``iter()`` continues there. Closes a live iterator.

        Another number of ranks, and another batch size, go on where those left the epoch that saved
        the state: what they did not hand out comes exactly once over all ranks, but for fewer
        examples than there are ranks, and with the random draws that it would have had. Without an
        echo, and if ranks times batch size is what it was, each global batch is the same set.

        Args:
            saved: the state of one rank, or where ranks' states differ the list of all.
            elastic: whether ranks and batch size may differ; False refuses such a state.

        Raises StateError when the state belongs to another pipeline, seed or version; and where
        other ranks cannot go on in the middle of an epoch.
        """
        self._cursor.load(unwrap_state(saved), elastic=elastic)
