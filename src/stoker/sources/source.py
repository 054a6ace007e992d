"""``Source``: examples by number, for sources of stoker's and of other packages alike.

``Reader`` and ``Rows`` are two ways to get many examples: reads ahead of their use, and rows in
arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Allocator, Recycler
from stoker.basics.fingerprint import Fingerprint
from stoker.schedule.selection import Selection

T_co = TypeVar("T_co", covariant=True)
Indices = Sequence[int] | NDArray[np.int64]
# Of batches that are gathered at once: more would leave the CPU's caches. Chosen, not measured.
_TOGETHER_BYTES = 1 << 20


class Source(ABC, Generic[T_co]):
    """Examples by number; ``stoker.from_dataset`` makes a pipeline of it.

    ``__len__`` and ``__getitem__`` make a source. Each other method tells stoker more about the
    data, for one job; write those that you need.

    All worker threads call one object if it is declared ``stoker.thread_safe``; otherwise it runs
    in the loop's thread or in worker processes, which fork or unpickle it. Its length
    may change between epochs, not within one.

    Attributes:
        prefers_blocks: whether ``.shuffle()`` shuffles by ``blocks`` if the user does not choose.

    Example::

        class Squares(stoker.Source[int]):
            def __len__(self):
                return 1_000

            def __getitem__(self, index):
                return index * index
    """

    prefers_blocks: bool = True

    @abstractmethod
    def __len__(self) -> int:
        """Return how many examples there are."""

    @abstractmethod
    def __getitem__(self, index: int, /) -> T_co:
        """Return an example, by its number from 0 on. Errors are reported with its number."""

    def fetch(self, indices: Indices) -> list[T_co]:
        """Return the examples at these indices, a list or an ``int64`` array, in one go.

        After an error, each is fetched alone, to find the one that fails. By default each is asked
        for by ``__getitem__``.
        """
        return [self[int(index)] for index in indices]

    @property
    def name(self) -> str:
        """Its name, for ``print(pipeline)`` and errors."""
        return f"from_dataset({type(self).__name__})"

    @property
    def fields(self) -> Sequence[str | int] | None:
        """The fields that every example has; None: unknown. ``on=`` is checked against them."""
        return None

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of the classes, in the order of their labels; None: there are no classes."""
        return None

    def path(self, index: int) -> str | None:
        """Return the origin of an example, for errors: a file, a URL, a key."""
        return None

    def local_path(self, index: int) -> str | None:
        """Return the local file whose whole content is the example; None if there is none.

        When a cache has its bytes, the kernel is told to drop its own copy.
        """
        return None

    def name_of(self, index: int) -> str:
        """Return an example's name, the same on every host with the same data: not a whole path."""
        return str(index)

    def extent(self) -> str:
        """Return its size, as text for ``print``."""
        return f"{len(self):,} examples"

    def signature(self) -> str:
        """Return in a line what a saved state must match, the same on every host.

        By default these are its class and its length.
        """
        return f"{type(self).__name__} of {len(self)}"

    def identity(self) -> str | None:
        """Return a text that is equal for equal data, in every process and job; None if unknown.

        With it, caches need no ``version=``.
        """
        return None

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the fingerprint of an example's current content, by default its number alone.

        A cache takes it before and after it reads an example. An OSError means that it cannot be
        found; reading the example then gives the precise error.
        """
        return Fingerprint(int(index))

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """For each block, the number after its last example; None: there are no blocks.

        A block of neighbours is read at little more than the cost of one example.
        """
        return None

    @property
    def rows(self) -> Rows | None:
        """The rows of all examples, perhaps the source itself; None if they lie in no arrays.

        Batches are gathered from them without single examples.
        """
        return None

    def column(self, field: str | int) -> NDArray[Any]:
        """Return one of ``fields`` for all examples: numbers, or lengths of lists, text and bytes.

        Shape ``[n]``. Raises TypeError if that would be slow, or the field has other values.
        """
        raise TypeError(
            f"{self.name} does not read one field of all examples: give the numbers as an array "
            "(pipeline.sizes(fn) makes one)"
        )

    def labels(self, field: str | int | None = None) -> NDArray[Any]:
        """Return the label of each example, shape ``[n]``, without reading the examples.

        ``field``: the one that has them; None: the source's own, as the classes of a folder are.
        Raises TypeError if it has none, or if reading one field would be slow.
        """
        if field is None:
            raise TypeError(f"{self.name} has no labels of its own: name the field that has them")
        return self.column(field)

    def reader(self, selection: Selection | None = None) -> Reader | None:
        """Open a reader for one epoch; None if reading ahead would not help.

        ``selection``: the examples that will be read, about in their order; None: any, in any
        order.
        """
        return None


class Reader(Protocol):
    """Reads the examples of one epoch, many at a time; any thread may call it.

    Attributes:
        requests: how many reads may be under way.
    """

    requests: int

    def expect(self, indices: Indices) -> None:
        """Start to read examples that will be fetched; returns at once."""
        ...

    def fetch(self, indices: Indices) -> list[Any]:
        """Return the examples at these indices. An error concerns the first of them alone."""
        ...

    def close(self) -> None:
        """Cancel the reads under way."""
        ...


class Rows(ABC):
    """Rows in arrays, from which batches are gathered. Several threads may call it at once.

    Attributes:
        releases_gil: whether gathering releases the GIL, so that threads gather in parallel.
    """

    releases_gil: bool = True

    @abstractmethod
    def allocate(self, rows: int, recycler: Allocator) -> Any:
        """Return uninitialised arrays for a batch; ``gather`` fills them.

        ``recycler.array(shape, dtype)`` makes one in memory that earlier batches have freed.
        """

    @abstractmethod
    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        """Copy rows into the arrays of ``batch``, from its row ``start`` on."""

    def split(self, batch: Any, rows: int) -> list[Any]:
        """Return allocated arrays as batches of ``rows`` rows: views, the last one of the rest."""
        count = len(pytree.leaves(batch)[0])
        if count <= rows:
            return [batch]
        spans = [slice(start, start + rows) for start in range(0, count, rows)]
        # Of two arrays, a row a batch: 3.2 us a batch; a walk through a pytree adds 0.3 us.
        if type(batch) is np.ndarray:
            return [batch[span] for span in spans]
        if type(batch) is tuple and all(type(leaf) is np.ndarray for leaf in batch):
            return [tuple([leaf[span] for leaf in batch]) for span in spans]
        return [pytree.map_leaves(itemgetter(span), batch) for span in spans]

    def together(self, rows: int) -> int:
        """Return how many batches of ``rows`` rows are gathered at once, if batches are quick to
        gather.

        This shares the fixed cost of a gather. The batches stay in the CPU's caches, except for a
        few large ones.
        """
        nbytes = rows * pytree.nbytes(self.allocate(1, Recycler()))
        return max(4, min(64, _TOGETHER_BYTES // max(1, nbytes)))

    def concatenate(self, others: Sequence[Rows]) -> Rows | None:
        """Return these rows followed by others, as one; None if that would not be faster."""
        return None

    def data_bytes(self, batch: Any) -> int:
        """Return the number of bytes that ``take`` has copied."""
        return pytree.data_bytes(batch)

    def take(self, indices: NDArray[np.int64], recycler: Allocator) -> Any:
        """Return the arrays of a batch, filled."""
        batch = self.allocate(len(indices), recycler)
        self.gather(indices, batch, 0)
        return batch
