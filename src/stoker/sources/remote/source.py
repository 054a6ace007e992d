"""The base of sources at URLs: opening their file system, and reading ahead."""

from __future__ import annotations

import contextlib
import functools
import importlib
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stoker.basics.future import run_on
from stoker.basics.signals import defer_interrupts
from stoker.schedule.selection import Selection
from stoker.sources.files import FileVersion, PartialFile, for_each
from stoker.sources.patterns import is_web
from stoker.sources.remote import storage
from stoker.sources.remote.failures import retry
from stoker.sources.remote.reader import Files, RemoteFile, RemoteReader
from stoker.sources.remote.storage import Entries, FileStorage, RemoteOptions, Storage, import_extra
from stoker.sources.remote.web import WebStorage
from stoker.sources.source import Indices, Reader, Source, T_co

T = TypeVar("T")
R = TypeVar("R")


class ReadsRanges(Source[T_co]):
    """A source of files, or of ranges of files, in one remote file system; they are read ahead.

    Its readers see it as ``Files``. Open connections belong to the readers.

    Attributes:
        access: how to open the file system; None for local files, which ``fetch`` of a subclass
            reads.
    """

    access: Access | None

    @abstractmethod
    def locate(self, index: int) -> RemoteFile:
        """Return the file or range of an example, or of a block if blocks are read."""

    @abstractmethod
    def example(self, index: int, data: bytes) -> T_co:
        """Make the example, or the block, from its bytes."""

    def __getitem__(self, index: int, /) -> T_co:
        (example,) = self.fetch([index])
        return example

    def reader(self, selection: Selection | None = None) -> Reader | None:
        """Open the file system for reading ahead; None for local files, as the kernel does it."""
        return None if self.access is None else self.access.reader(self)

    def fetch(self, indices: Indices) -> list[T_co]:
        """Read examples, through a reader that is opened for this call."""
        reader = self.reader()
        assert reader is not None
        with contextlib.closing(reader):
            return reader.fetch(indices)


@dataclass(frozen=True)
class Access:
    """The arguments that open one file system.

    Attributes:
        url: a folder, or any file.
        options: how its files are read.
    """

    url: str
    options: RemoteOptions

    def open(self) -> Storage:
        """Open the file system.

        Raises ImportError when a package is missing, ValueError for an unknown protocol.
        """
        asyn = import_extra("fsspec.asyn", self.url)
        with defer_interrupts():  # a loop that is made by half stays so for all
            asyn.get_loop()
        protocol = self.url.partition("://")[0].lower()
        try:
            kind = importlib.import_module("fsspec").get_filesystem_class(protocol)
        except ImportError as error:
            raise ImportError(f"{self.url}: {error}: pip install 'fsspec[http,s3]'") from error
        if is_web(self.url):
            return WebStorage(kind, self.url, self.options)
        settings = {**kind._get_kwargs_from_urls(self.url), **self.options.storage_options}
        if protocol not in ("s3", "s3a"):
            fs = kind(**settings)
        else:
            ours = {
                "max_pool_connections": self.options.requests,
                "read_timeout": storage.STALL_S,
                "connect_timeout": storage.STALL_S,
                "retries": {"total_max_attempts": 1},  # those that are counted are ours
            }
            # Else a file is asked for its size first, and read in ten parts at once.
            settings = {"max_concurrency": 1, **settings}
            settings["config_kwargs"] = {**ours, **settings.get("config_kwargs", {})}
            fs = kind(**settings)
            fs.retries = 1
        return FileStorage(fs, fs.loop if fs.async_impl else asyn.get_loop())

    def reader(self, files: Files) -> RemoteReader:
        return RemoteReader(files, self.open(), self.options)

    def for_each(
        self,
        urls: Sequence[str],
        look: Callable[[PartialFile], T],
        show: Callable[[Sequence[T], int], bool] = lambda found, of: False,
    ) -> list[T]:
        """Return the results of ``look`` for each file, as ``files.for_each``."""
        opened, has_ended = self.open(), False

        def check() -> None:
            if has_ended:
                raise RuntimeError("another file could not be read")

        def run(url: str, attempt: Callable[[], Awaitable[R]]) -> R:
            check()
            again = functools.partial(retry, attempt, url, self.options.timeout_s, check)
            return run_on(opened.loop, again)

        def look_at(url: str) -> T:
            path = opened.to_path(url)
            version = FileVersion(*run(url, lambda: opened.look_up(path)))

            def read(start: int, nbytes: int) -> bytes:
                return run(url, lambda: opened.read_part(path, start, nbytes, *version[:2]))

            return look(PartialFile(url, version, read, reads_ahead=True))

        try:
            return for_each(urls, look_at, self.options.requests, show)
        finally:
            has_ended = True  # where one has failed, others may be under way
            run_on(opened.loop, opened.close)

    def find(self, levels: int | None = None) -> Entries:
        """List the files below ``url``, at least those down to so many levels.

        Raises ValueError over HTTP, which has no listings; FileNotFoundError or RemoteError.
        """
        if is_web(self.url):
            raise ValueError(
                f"{self.url}: HTTP cannot list files: give their URLs, as a list or by braces such "
                "as {000..099}"
            )
        opened = self.open()
        assert isinstance(opened, FileStorage)
        path = opened.to_path(self.url).rstrip("/")

        def attempt() -> Awaitable[Entries]:
            return opened.find(path, levels)

        return run_on(opened.loop, lambda: retry(attempt, self.url, self.options.timeout_s))
