"""``Source``: examples by number, and optional abilities of a source.

``__len__`` and ``__getitem__`` make a source. Each other class here adds one or two methods for one
job. A source inherits from the classes whose job it can do (see docs/extending.md). stoker's own
sources are made of the same classes.
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

    All worker threads call one object if it is declared ``stoker.thread_safe``; otherwise it runs
    in the loop's thread or in worker processes, which fork or unpickle it. Its length
    may change between epochs, not within one.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return how many examples there are."""

    @abstractmethod
    def __getitem__(self, index: int, /) -> T_co:
        """Return an example, by its number from 0 on. Errors are reported with its number."""


class FetchesMany(Source[T_co]):
    """A source that reads many examples at once; ``fetch`` stands in for ``__getitem__``."""

    @abstractmethod
    def fetch(self, indices: Indices) -> list[T_co]:
        """Return the examples at these indices, as a list or an ``int64`` array.

        After an error, each is fetched alone, to find the one that fails.
        """

    def __getitem__(self, index: int, /) -> T_co:
        (example,) = self.fetch([index])
        return example


class Described(Source[T_co]):
    """A source that describes itself: in ``print(pipeline)``, errors and checks."""

    @property
    def name(self) -> str:
        """Its name, by default that of its class."""
        return type(self).__name__

    @property
    def fields(self) -> Sequence[str | int] | None:
        """The fields that every example has; None: unknown. ``on=`` is checked against them."""
        return None

    def path(self, index: int) -> str | None:
        """Return the origin of an example, for errors: a file, a URL, a key."""
        return None

    def name_of(self, index: int) -> str:
        """Return an example's name, the same on every host with the same data: not a whole path."""
        return str(index)

    def extent(self) -> str:
        """Return its size, as text for ``print``."""
        return f"{len(self):,} examples"


class HasSignature(Source[T_co]):
    """A source with settings that a saved state must match, besides its class and length."""

    @abstractmethod
    def signature(self) -> str:
        """Return its settings and its length, in a line; the same on every host."""


class Labeled(Source[T_co]):
    """A source whose examples belong to classes: ``pipeline.class_names``."""

    @property
    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """The names of the classes, in the order of their labels."""


class Identified(Source[T_co]):
    """A source that knows which data it reads, so that caches need no ``version=``."""

    @abstractmethod
    def identity(self) -> str | None:
        """Return a text that is equal for equal data, in every process and job; None if unknown."""


class Fingerprinted(Identified[T_co]):
    """A source that notices when the content of single examples changes.

    A cache takes the fingerprint before and after it reads an example.
    """

    @abstractmethod
    def fingerprint(self, index: int) -> Fingerprint:
        """Return the fingerprint of an example's current content.

        An OSError means that it cannot be found; reading it then gives the precise error.
        """


class ReadsFiles(Source[T_co]):
    """A source whose examples are the contents of one local file each."""

    @abstractmethod
    def local_path(self, index: int) -> str | None:
        """Return the file; None if there is none."""


class ReadsBlocks(Source[T_co]):
    """A source that reads a whole block of neighbours at little more than the cost of one example.

    Attributes:
        prefers_blocks: whether ``.shuffle()`` shuffles by blocks if the user does not choose.
    """

    prefers_blocks: bool = True

    @property
    @abstractmethod
    def blocks(self) -> NDArray[np.int64] | None:
        """For each block, the number after its last example; None: there are no blocks."""


class ReadsColumns(Source[T_co]):
    """A source that reads one field of all examples at little cost."""

    @abstractmethod
    def column(self, field: str | int) -> NDArray[Any]:
        """Return one of ``fields`` for all examples: numbers, or lengths of lists, text and bytes.

        Shape ``[n]``. Raises TypeError if the field has other values.
        """


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


class ReadsAhead(Source[T_co]):
    """A source that can start reads before their examples are needed."""

    @abstractmethod
    def reader(self, selection: Selection | None = None) -> Reader | None:
        """Open a reader for one epoch; None if reading ahead would not help.

        ``selection``: the examples that will be read, about in their order; None: any, in any
        order.
        """


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


class GathersRows(Source[T_co]):
    """A source whose examples lie in arrays: batches are gathered without single examples."""

    @property
    @abstractmethod
    def rows(self) -> Rows | None:
        """Their rows, perhaps the source itself; None if single examples are needed."""


class OwnSource(FetchesMany[Any], Described[Any]):
    """A source of stoker's own: safe for threads, of a fixed length, and it draws nothing."""
