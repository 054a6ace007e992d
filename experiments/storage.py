"""Where images come from: slow storage, emulated or remote, or an in-memory copy."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import stoker
from experiments.clock import StoppableClock
from experiments.images import ImageSet
from experiments.server import Server, serving
from experiments.settings import Settings
from stoker import sources
from stoker.basics.resources import format_bytes


class Source:
    """Makes the beginning of a pipeline, by seed: examples (image, label), in order of the images.

    While `clock` is stopped, storage gives nothing.
    """

    def __init__(
        self, pipeline_of: Callable[[int], stoker.Pipeline], clock: StoppableClock | None = None
    ) -> None:
        self._pipeline_of = pipeline_of
        self.clock = clock or StoppableClock()

    def __call__(self, seed: int) -> stoker.Pipeline:
        """Return the beginning of a pipeline."""
        return self._pipeline_of(seed)


@dataclass(frozen=True)
class Limits:
    """What storage is limited to."""

    latency_s: float
    """Of every read, in seconds."""
    requests: int
    """Reads at a time."""
    bandwidth_bytes_per_s: float | None = None
    """Of all reads together; None: no limit."""


class Storage(Protocol):
    """Storage of the training images, whose speed can be set."""

    name: str
    """What it is, for people."""

    def limits(self, batch_s: float) -> Limits:
        """Return limits under which reading alone takes `batch_s` seconds a batch; 0: none."""
        ...

    def opened(self, limits: Limits) -> AbstractContextManager[Source]:
        """Read from it within a block."""
        ...

    def described(self, limits: Limits) -> str:
        """Tell people of the limits."""
        ...


class Example(NamedTuple):
    """One training example."""

    image: Any
    """A whole image file as bytes, or decoded: uint8 [height, width, 3]."""
    label: int


class EmulatedStorage:
    """Image files behind a latency, which sets the speed; every reader is a request."""

    name = "emulated"

    def __init__(self, images: ImageSet, settings: Settings) -> None:
        self._images = images
        self._readers = settings.readers
        self._batch_size = settings.batch_size

    def limits(self, batch_s: float) -> Limits:
        """Return the latency of every read."""
        return Limits(batch_s * self._readers / self._batch_size, self._readers)

    def reading_s(self, limits: Limits) -> float:
        """Return the time in seconds that reading alone then takes a batch."""
        return limits.latency_s * self._batch_size / self._readers

    def opened(self, limits: Limits) -> AbstractContextManager[EmulatedSource]:
        """Read from it within a block."""
        return nullcontext(EmulatedSource(self._images, limits))

    def described(self, limits: Limits) -> str:
        """Tell people of the limits."""
        return f"{limits.latency_s * 1e3:.1f} ms a read, {limits.requests} reads at a time"


class EmulatedSource(Source):
    """Emulated storage, whose latency can change while it is read."""

    def __init__(self, images: ImageSet, limits: Limits) -> None:
        clock = StoppableClock()
        files = _SlowFiles(images.train_paths, images.train_labels, limits.latency_s, clock)
        super().__init__(
            lambda seed: stoker.from_dataset(files, seed=seed).workers(limits.requests), clock
        )
        self._files = files

    def set_latency(self, latency_s: float) -> None:
        """Have every read take that long that begins from now on, in all pipelines."""
        self._files.latency_s = latency_s


class RemoteStorage:
    """A local HTTP server in a process of its own; its bandwidth sets the speed.

    Its latency and the number of requests are given. With fewer requests it would be slower, too,
    but that could be had back by asking for more at a time; bandwidth cannot.
    """

    name = "a local HTTP server"

    def __init__(self, images: ImageSet, settings: Settings, folder: Path) -> None:
        """Take a new folder for links to the images."""
        self._images = images
        self._folder = folder
        self._settings = settings
        self._batch_bytes = settings.batch_size * images.train_bytes / len(images.train_paths)
        for number, path in enumerate(images.train_paths):
            os.symlink(os.path.abspath(path), folder / f"{number}")

    def limits(self, batch_s: float) -> Limits:
        """Return the bandwidth, latency and requests stated."""
        rate = self._batch_bytes / batch_s if batch_s > 0 else None
        return Limits(self._settings.remote_latency_s, self._settings.remote_requests, rate)

    @contextmanager
    def opened(self, limits: Limits) -> Iterator[Source]:
        """Have the server run within a block."""
        with serving(
            self._folder,
            latency_s=limits.latency_s,
            bandwidth_bytes_per_s=limits.bandwidth_bytes_per_s,
        ) as server:
            files = _ServedFiles(server.url, self._images, limits.requests)
            yield Source(
                functools.cache(lambda seed: stoker.from_dataset(files, seed=seed)),
                _ServedClock(server),
            )

    def described(self, limits: Limits) -> str:
        """Tell people of the limits."""
        rate = limits.bandwidth_bytes_per_s
        return (
            f"latency {limits.latency_s * 1e3:.0f} ms, "
            f"bandwidth {'unlimited' if rate is None else f'{format_bytes(int(rate))}/s'}, "
            f"{limits.requests} requests in flight"
        )


@contextmanager
def storage_of(images: ImageSet, settings: Settings, *, remote: bool) -> Iterator[Storage]:
    """Return the storage of an experiment; what it needs on disk goes with the block."""
    if not remote:
        yield EmulatedStorage(images, settings)
        return
    with tempfile.TemporaryDirectory(prefix="stoker-demo-") as folder:
        yield RemoteStorage(images, settings, Path(folder))


def in_memory(images: ImageSet, settings: Settings) -> Source:
    """Return what reads decoded images from memory."""
    decoded = _Decoded(images.train_images, images.train_labels)
    return Source(lambda seed: stoker.from_dataset(decoded, seed=seed).workers(settings.readers))


class _ServedClock(StoppableClock):
    """A clock that stops a server, too."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    @contextmanager
    def stopped(self) -> Iterator[None]:
        with super().stopped(), self._server.stopped():
            yield


@stoker.thread_safe
class _SlowFiles:
    """Files behind a latency of `latency_s` seconds for every read; it may be set at any time.

    Reads of several threads overlap, as requests to remote storage do. Thread-safe.
    """

    def __init__(
        self,
        paths: Sequence[str],
        labels: Sequence[int],
        latency_s: float,
        clock: StoppableClock,
    ) -> None:
        self._paths = paths
        self._labels = labels
        self._clock = clock
        self.latency_s = latency_s

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Example:
        self._clock.sleep(self.latency_s)
        with open(self._paths[index], "rb") as file:
            return Example(file.read(), self._labels[index])


class _ServedFiles(sources.ReadsRanges[Example]):
    """Files of a server, by their numbers, with `requests` requests at a time."""

    access: sources.Access

    def __init__(self, url: str, images: ImageSet, requests: int) -> None:
        self.access = sources.Access(url, sources.RemoteOptions(requests=requests))
        self._sizes = [os.path.getsize(path) for path in images.train_paths]
        self._labels = images.train_labels

    def __len__(self) -> int:
        return len(self._sizes)

    def locate(self, index: int) -> sources.RemoteFile:
        return sources.RemoteFile(f"{self.access.url}/{index}", self._sizes[index])

    def example(self, index: int, data: bytes) -> Example:
        return Example(data, self._labels[index])


class _Decoded:
    """Decoded images, uint8 [images, height, width, 3]: views, not copies."""

    def __init__(self, images: NDArray[np.uint8], labels: Sequence[int]) -> None:
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Example:
        return Example(self._images[index], self._labels[index])
