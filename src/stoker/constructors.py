"""Where pipelines begin that read objects: a function for each kind of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

from numpy.typing import NDArray

from stoker.chain import Chain
from stoker.pipeline import Pipeline
from stoker.sources.arrays import ArraySource
from stoker.sources.arrow.huggingface import HuggingFaceSource
from stoker.sources.dataset import DatasetSource
from stoker.sources.iterable import IterableSource
from stoker.sources.loader import LoaderSource
from stoker.stages.echo import Factor
from stoker.stages.skip import OnError

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Array = NDArray[Any]


class _Items(Protocol[T_co]):
    """What ``from_dataset`` takes, for type checkers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@overload
def from_dataset(
    dataset: _Items[T], *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[T]: ...


@overload
def from_dataset(
    dataset: Any, *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[Any]: ...


def from_dataset(
    dataset: Any, *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[Any]:
    """Read any object with ``__len__`` and ``__getitem__`` (integers from 0).

    ``__getitems__(indices)`` is used where it exists. torch datasets fit; Hugging Face's, too, but
    ``from_huggingface`` reads them faster.
    Each worker thread calls a copy of its own, as each worker of ``DataLoader`` does; randomness
    inside it is then not reproducible (use ``random_map``, or process workers).

    Args:
        dataset: the object.
        seed: of shuffling, echoing and random maps; drawn if there is none.
        on_error: ``"raise"``, or how many examples may be skipped in an epoch because a stage
            before ``batch`` failed on them: a count (``100``) or a fraction (``0.01``). Each is
            logged (logger ``stoker``) and counted in ``stats()``; one too many raises BudgetSpent
            with the list. Stages may have a budget of their own.

    Raises TypeError when a method is missing.
    """
    if isinstance(dataset, Pipeline):
        raise TypeError(
            "a pipeline is no data set, it goes on by its methods: pipeline.map(fn), .batch(n)"
        )
    return Pipeline(Chain.begin(DatasetSource(dataset), seed, on_error))


def from_huggingface(
    dataset: Any,
    columns: Sequence[str] | None = None,
    *,
    seed: int | None = None,
    on_error: OnError = "raise",
) -> Pipeline[dict[str, Any]]:
    """Read rows of a Hugging Face ``datasets.Dataset``: dicts by column, as in ``from_parquet``.

    Rows come straight from its Arrow tables, which it maps from files. Images, sound and video are
    the bytes that are stored: decode them in ``.map()``. The data set's format is not looked at,
    but for its columns; ``from_dataset`` asks the data set as it is.

    Args:
        dataset: one split, not streaming.
        columns: the columns that are read; those of its format, if there are none.
        seed, on_error: as in ``from_dataset``.

    Raises TypeError for what is no such data set, ValueError where it has no such column, no rows,
    or a transform (``with_transform``).
    """
    return Pipeline(Chain.begin(HuggingFaceSource(dataset, columns), seed, on_error))


def from_iterable(
    examples: Iterable[T] | Callable[[], Iterable[T]],
    *,
    seed: int | None = None,
    on_error: OnError = "raise",
) -> Pipeline[T]:
    """Read a stream: a re-iterable object of examples, or a function that returns an iterator.

    One pass is one epoch. It is iterated in this process, by one thread at a time, ahead of the
    consumer. Its examples cannot be asked for again, so an epoch has no state in its middle, and
    shuffling goes through a buffer. What it raises ends it and cannot be skipped.

    An object with ``state_dict()`` and ``load_state_dict(state)`` (a streaming data set of Hugging
    Face, a ``torchdata.nodes.Loader``) has a state in the middle, which is kept in the pipeline's:
    it is asked behind every 16th example, so up to 15 are read again on a resume. One with
    ``set_epoch(epoch)`` is told the epoch before each pass.

    Args:
        examples: the stream; every rank must see the same one in the same order.
        seed, on_error: as in ``from_dataset``.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """
    return Pipeline(Chain.begin(IterableSource(examples), seed, on_error))


@overload
def from_arrays(array: Array, /, *, seed: int | None = None) -> Pipeline[Array]: ...


@overload
def from_arrays(
    first: Array, second: Array, /, *, seed: int | None = None
) -> Pipeline[tuple[Array, Array]]: ...


@overload
def from_arrays(*arrays: Array, seed: int | None = None) -> Pipeline[tuple[Array, ...]]: ...


@overload
def from_arrays(*arrays: Any, seed: int | None = None) -> Pipeline[Any]: ...


def from_arrays(*arrays: Any, seed: int | None = None) -> Pipeline[Any]:
    """Read rows of arrays of one length: NumPy's, memory maps, HDF5, Zarr, whatever is sliced.

    An example is a tuple of rows, or a bare row of a single array. Batches are gathered
    straight from the arrays, which are never written to.

    Args:
        arrays: NumPy arrays; datasets of h5py, whose file each process opens anew; or objects with
            ``shape`` and ``dtype`` that give arrays for ``[start:stop]`` and perhaps for lists of
            indices. These are read in ascending order.
        seed: as in ``from_dataset``.

    Raises TypeError for other objects and masked arrays, ValueError for arrays of different
    lengths, for what gives none, and for HDF5 datasets without a file that can be opened again.
    """
    return Pipeline(Chain.begin(ArraySource(arrays), seed))


def from_table(
    table: Any, *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[dict[str, Any]]:
    """Read rows of a table in memory: dicts by column, as in ``from_parquet``.

    Args:
        table: a ``pyarrow.Table``, or a DataFrame of pandas, Polars or another library with
            Arrow's protocol (``__arrow_c_stream__``, ``__dataframe__``). Not to be changed later.
        seed, on_error: as in ``from_dataset``.

    Raises TypeError for what is no table, ValueError for one without rows; ImportError without
    pyarrow (``pip install 'stoker[parquet]'``).
    """
    from stoker.sources.arrow.table import TableSource

    return Pipeline(Chain.begin(TableSource(table), seed, on_error))


@overload
def from_loader(
    loader: Iterable[T] | Callable[[], Iterable[T]], *, seed: int | None = None
) -> Pipeline[T]: ...


@overload
def from_loader(loader: Any, *, seed: int | None = None) -> Pipeline[Any]: ...


def from_loader(loader: Any, *, seed: int | None = None) -> Pipeline[Any]:
    """Take ready batches from any object that can be iterated anew every epoch.

    A torch ``DataLoader`` above all: its workers, sampler, pinning and random draws stay as
    its owner set them. What it raises comes through unchanged. It is iterated in the consumer's
    thread; under ``.echo("auto")`` by a thread of its own (what a ``DataLoader`` without workers
    draws at random then mixes with what training draws).

    Args:
        loader: a re-iterable of batches, a function that returns an iterator, or an iterator with
            ``reset()`` such as DALI's.
        seed: of echoing and random maps; drawn if there is none.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """
    return Pipeline(Chain.begin(LoaderSource(loader), seed))


def echo(
    loader: Any,
    factor: Factor = "auto",
    *,
    max_factor: int | None = None,
    min_distance: int | None = None,
    pool: int | str | None = None,
    transform: Callable[[Any, Any], Any] | None = None,
    on: str | int | None = None,
    repeats_only: bool = False,
    device: Any = None,
    replay: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> Pipeline[Any]:
    """Echo the batches of a loader that you keep: batch echoing.

    Short for ``from_loader(loader).to(device).echo(factor).random_map(transform, on=on)``.
    Earlier uses of a batch are copies; what is done to one reaches no other.

    Args:
        loader: as in ``from_loader``.
        factor, max_factor, min_distance, pool, replay: as in ``Pipeline.echo``.
        transform: called as ``transform(batch, rng)`` anew for each use: augment there. On a
            device ``rng`` is a ``torch.Generator`` of it, else a ``numpy.random.Generator``.
            ``stoker.images`` has some for images.
        on: the field of the batch that ``transform`` is given, instead of the whole.
        repeats_only: leave first uses of a batch as they are: where the loader augments already,
            and twice would be too much.
        device: keep batches there, as torch tensors, and transform them there.
        seed: of echoing and of ``rng``; drawn if there is none.
    """
    pipeline = from_loader(loader, seed=seed)
    if device is not None:
        pipeline = pipeline.to(device)
    pipeline = pipeline.echo(
        factor, max_factor=max_factor, min_distance=min_distance, pool=pool, replay=replay
    )
    if transform is None:
        return pipeline
    return pipeline.random_map(transform, on=on, repeats_only=repeats_only)
