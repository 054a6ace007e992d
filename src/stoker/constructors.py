"""Functions that begin a pipeline over objects in memory: one for each kind."""

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
    """The argument of ``from_dataset``, for type checkers."""

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

    ``__getitems__(indices)`` is used if it exists. torch datasets work; Hugging Face's do, too, but
    ``from_huggingface`` reads them faster.
    Each worker thread calls its own copy, as each worker of ``DataLoader`` does; random numbers
    drawn inside it are not reproducible (use ``random_map``, or process workers).

    Args:
        dataset: the object.
        seed: of shuffling, echoing and random maps; drawn at random by default.
        on_error: ``"raise"``, or how many examples of an epoch may be skipped after an error in a
            stage before ``batch``: a count (``100``) or a fraction (``0.01``). Each skip is
            logged (logger ``stoker``) and counted in ``stats()``; one too many raises BudgetSpent
            with the list. A stage may have its own budget.

    Raises TypeError if a method is missing.
    """
    if isinstance(dataset, Pipeline):
        raise TypeError(
            "from_dataset() takes a dataset, not a pipeline: continue the pipeline with its "
            "methods, such as pipeline.map(fn).batch(n)"
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

    Rows come straight from its memory-mapped Arrow tables. Images, sound and video are the stored
    bytes: decode them in ``.map()``. The dataset's format is ignored, except for its columns;
    ``from_dataset`` keeps the format.

    Args:
        dataset: one split, not streaming.
        columns: the columns to read; by default those of its format.
        seed, on_error: as in ``from_dataset``.

    Raises TypeError for any other object, ValueError if a column is missing, and for a dataset
    without rows or with a transform (``with_transform``).
    """
    return Pipeline(Chain.begin(HuggingFaceSource(dataset, columns), seed, on_error))


def from_iterable(
    examples: Iterable[T] | Callable[[], Iterable[T]],
    *,
    seed: int | None = None,
    on_error: OnError = "raise",
) -> Pipeline[T]:
    """Read a stream: a re-iterable object of examples, or a function that returns an iterator.

    One pass is one epoch. This process iterates the stream, in one thread at a time, ahead of the
    consumer. Its examples cannot be read again, so there is no state in the middle of an epoch, and
    shuffling uses a buffer. An exception of the stream ends the epoch and cannot be skipped.

    If the object has ``state_dict()`` and ``load_state_dict(state)`` (a streaming dataset of
    Hugging Face, a ``torchdata.nodes.Loader``), there is a state in the middle of an epoch: the
    pipeline takes the object's state after every 16th example, so a resume reads up to 15 again.
    If it has ``set_epoch(epoch)``, that is called before each pass.

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
    """Read rows of arrays of one length: NumPy, memory maps, HDF5, Zarr, other sliceable arrays.

    An example is a tuple of rows, or a bare row if there is one array. Batches are gathered
    straight from the arrays, which are never written to.

    Args:
        arrays: NumPy arrays; datasets of h5py, whose file each process opens again; or objects with
            ``shape`` and ``dtype`` that give arrays for ``[start:stop]`` and perhaps for lists of
            indices. Indices are read in ascending order.
        seed: as in ``from_dataset``.

    Raises TypeError for other objects and masked arrays, ValueError for arrays of different
    lengths or without a length, and for HDF5 datasets whose file cannot be opened again.
    """
    return Pipeline(Chain.begin(ArraySource(arrays), seed))


def from_table(
    table: Any, *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[dict[str, Any]]:
    """Read rows of a table in memory: dicts by column, as in ``from_parquet``.

    Args:
        table: a ``pyarrow.Table``, or a DataFrame of pandas, Polars or another library with
            Arrow's protocol (``__arrow_c_stream__``, ``__dataframe__``). Do not change it later.
        seed, on_error: as in ``from_dataset``.

    Raises TypeError for any other object, ValueError for a table without rows, ImportError without
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
    """Take ready batches from any object that can be iterated again every epoch.

    A torch ``DataLoader``, for example, keeps its workers, sampler, pinning and random draws. Its
    exceptions come through unchanged. The consumer's thread iterates it; under ``.echo("auto")`` a
    background thread does (the random draws of a ``DataLoader`` without workers then mix with those
    of training).

    Args:
        loader: a re-iterable of batches, a function that returns an iterator, or an iterator with
            ``reset()`` such as DALI's.
        seed: of echoing and random maps; drawn at random by default.

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
    Each use of a batch is a copy, so changes to one reach no other.

    Args:
        loader: as in ``from_loader``.
        factor, max_factor, min_distance, pool, replay: as in ``Pipeline.echo``.
        transform: called as ``transform(batch, rng)`` for each use: augment there. On a
            device ``rng`` is a ``torch.Generator`` of it, else a ``numpy.random.Generator``.
            ``stoker.images`` has transforms for images.
        on: the field of the batch that ``transform`` gets, instead of the whole batch.
        repeats_only: do not transform first uses: for a loader that augments already.
        device: keep batches there, as torch tensors, and transform them there.
        seed: of echoing and of ``rng``; drawn at random by default.
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
