"""Remote files: listing, reading ahead, and everything that can go wrong with a server."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_source import fill

import stoker
from descriptors import open_descriptors
from experiments.server import Fault, Server, serving
from stoker.sources.folder import FolderSource
from stoker.sources.remote import storage
from stoker.sources.remote.files import File, FilesSource
from stoker.sources.remote.reader import RemoteReader
from stoker.sources.remote.storage import RemoteOptions
from strategies import FULL, few, shortened

LONG_S = 1000.0  # never waited for
AbstractFileSystem: Any = fsspec.AbstractFileSystem


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder) as server:
        yield folder, server


@pytest.fixture
def server(shared: tuple[Path, Server]) -> Server:
    shared[1].set_faults()
    return shared[1]


@pytest.fixture
def folder(shared: tuple[Path, Server]) -> Path:
    return Path(tempfile.mkdtemp(dir=shared[0]))


NAMES = [f"{c}/{i}.jpg" for c in ("cat", "dog") for i in range(4)]


@pytest.fixture
def url(server: Server, folder: Path) -> str:
    """The URL of ``folder`` with the files ``NAMES``, which hold their own names."""
    fill(folder, NAMES)
    return f"{server.url}/{folder.name}"


@pytest.fixture(autouse=True)
def no_warning_from_finalizers(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """Unclosed sessions warn when they are collected."""
    yield
    gc.collect()
    others = ("use of fork()", "`register_random` was passed")  # as in pyproject.toml
    assert not [one for one in recwarn if not any(each in str(one.message) for each in others)]


def folder_at(url: str, **options: Any) -> FolderSource:
    return FolderSource(url, RemoteOptions(**options))


def files_at(files: Any, **options: Any) -> FilesSource:
    return FilesSource(files, RemoteOptions(**options))


def named(url: str, names: list[str] = NAMES, **options: Any) -> FilesSource:
    """Return the files of these names below a URL."""
    return files_at([f"{url}/{name}" for name in names], **options)


def reader_of(source: Any) -> RemoteReader:
    reader = source.reader()
    assert isinstance(reader, RemoteReader)
    return reader


def contents(source: Any) -> list[Any]:
    with reading(source) as reader:
        return [tuple(example) for example in reader.fetch(range(len(source)))]


def data_of(source: Any) -> list[bytes]:
    """Read all files of a ``FilesSource``."""
    return [data for _, data in contents(source)]


def remember(folder: Path) -> str:
    """Copy a folder to the file system in memory; return its URL."""
    memory = fsspec.filesystem("memory")
    memory.rm("/", recursive=True)
    for file in folder.rglob("*"):
        if file.is_file():
            memory.pipe_file(str(file), file.read_bytes())
    return f"memory://{folder}"


def reading(source: Any) -> contextlib.closing[RemoteReader]:
    """Return a reader that is closed at the end."""
    return contextlib.closing(reader_of(source))


# -- what a folder is


def same_as_local(folder: Path) -> None:
    local = FolderSource(folder)
    for url in (remember(folder), f"file://{folder}", f"file://{folder}/"):
        remote = folder_at(url)
        assert remote.classes == local.classes
        assert contents(remote) == [tuple(e) for e in local.fetch(range(len(local)))]


def test_other_files_and_classes_that_are_given(folder: Path) -> None:
    fill(folder, ["b/1.wav", "b/2.WAV", "c/x.png"])
    url = remember(folder)
    classes = ["z", "c", "cat", "dog", "b"]
    for extensions in (["wav"], ["wav", "png"]):
        local, remote = (
            FolderSource(path, extensions=extensions, classes=classes) for path in (folder, url)
        )
        assert remote.classes == classes
        assert contents(remote) == [tuple(e) for e in local.fetch(range(len(local)))]
    with pytest.raises(ValueError, match=r"has a folder 'b'.* none of the 1 classes"):
        FolderSource(url, extensions=["wav"], classes=["c"])
    assert len(FolderSource(url, classes=["c"])) == 1


def test_a_folder_gives_what_a_local_one_gives(folder: Path) -> None:
    fill(folder, NAMES)
    url = remember(folder)
    source = folder_at(url)
    assert source.classes == ["cat", "dog"]
    assert len(source) == 8
    assert source.name == f"from_folder('{url}')"
    assert source.path(5) == f"{url}/dog/1.jpg"
    assert source.name_of(5) == "dog/1.jpg"
    (example,) = source.fetch([5])
    assert example._fields == source.fields == ("image", "label")
    assert example == (b"dog/1.jpg", 1)
    same_as_local(folder)
    fill(folder, ["ant/1.jpg", "cat/00.jpg"])  # which wait for the next listing
    assert len(folder_at(remember(folder))) == 10
    assert len(source) == 8
    assert contents(source)[4] == (b"dog/0.jpg", 1)


AWKWARD = [
    *("an image", "a#b", "a?b=c", "100%", "%41", "%2F", "a&amp;b", "<b>", "'\"`", "new\nline"),
    *("a:b", "-rf", "[x]", "{0}", "~", "a+b", "a;b", "a\\b", "\t", " lead", "日本", "é", "é"),
    *("https:", "x.jpg/y.jpg", "--><!--", "\x01", "C=N;O=D", "..x"[1:] + "x"),
]


def test_awkward_names(folder: Path) -> None:
    fill(folder, [f"a{n}/a{n}.jpg" for n in AWKWARD] + [f"one class/{n}.png" for n in AWKWARD])
    fill(folder, [b"caf\xe9/caf\xe9.jpg", b"one class/\xff\xfe.png"])
    same_as_local(folder)


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=20)


@few(8)
@given(classes=st.dictionaries(names, st.lists(names, max_size=3, unique=True), min_size=1))
def test_any_names(tmp_path_factory: Any, classes: dict[str, list[str]]) -> None:
    folder = tmp_path_factory.mktemp("named")
    for name, files in classes.items():
        fill(folder, [f"x{name}/y{file}.jpg" for file in files] or [f"x{name}/z.jpg"])
    same_as_local(folder)


def test_only_images_that_are_not_hidden(folder: Path) -> None:
    fill(
        folder,
        [
            *("c/a.png", "c/.hidden.png", "c/notes.txt", "c/png", "stray.png", ".git/x.png"),
            *("c/.png", "c/.thumbs/b.png", "c/deep/er/A.JPEG", "c/a.tar.gif", "b/none.txt"),
        ],
    )
    with pytest.warns(UserWarning, match="'b' has no images and is no class"):
        same_as_local(folder)


# -- what is no folder


def test_what_is_no_folder_of_classes(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        folder_at("memory://nowhere")
    fill(folder, ["1.jpg"])
    with pytest.raises(ValueError, match="has no sub-folders"):
        folder_at(remember(folder))
    fill(folder, ["cat/1.txt", "dog/1.txt"])
    with pytest.raises(ValueError, match="no images in its 2 sub-folders"):
        folder_at(remember(folder))
    fill(folder, NAMES)
    for url in (remember(folder), f"file://{folder}"):
        with pytest.raises(FileNotFoundError, match=r"nowhere"):
            folder_at(f"{url}/nowhere")
        with pytest.raises(FileNotFoundError, match=r"cat/0\.jpg"):
            folder_at(f"{url}/cat/0.jpg")
    with pytest.raises(ValueError, match="gopher"):
        folder_at("gopher://host/folder")


def test_http_lists_nothing(url: str, server: Server) -> None:
    with pytest.raises(ValueError, match=r"from_folder lists .*from_files the URLs.*099\}"):
        stoker.from_folder(url)
    for make, pattern in (
        (stoker.from_files, "*/*.jpg"),
        (stoker.from_tar, "[ab].tar"),
        (stoker.from_parquet, "**/*.parquet"),
    ):
        with pytest.raises(ValueError, match=rf"{url}: HTTP cannot list files: .*braces"):
            make(f"{url}/{pattern}")
    assert server.stats().requests == 0


class Tree(AbstractFileSystem):  # type: ignore[misc]
    """A file in each of two classes. The folders in ``fails`` cannot be listed so many times."""

    protocol = "tree"
    cachable = False
    fails: ClassVar[dict[str, int]] = {}
    listed: ClassVar[list[str]] = []

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self.listed.append(path)
        if self.fails.get(path, 0) > 0:
            self.fails[path] -= 1
            raise OSError(errno.EIO, "no answer", path)
        if path.endswith(("cat", "dog")):
            return [{"name": f"{path}/{n}.jpg", "type": "file", "size": 3} for n in range(2)]
        return [{"name": f"{path}/{c}", "type": "directory", "size": 0} for c in ("cat", "dog")]

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        return path[-9:-6].encode()


@pytest.fixture
def tree() -> Iterator[type[Tree]]:
    fsspec.register_implementation("tree", Tree, clobber=True)
    yield Tree
    Tree.fails.clear()
    Tree.listed.clear()


def test_a_listing_is_tried_again_and_no_part_of_it_is_left_out(tree: type[Tree]) -> None:
    tree.fails.update({"all": 1, "all/dog": 1})
    source = folder_at("tree://all", timeout_s=LONG_S)
    assert contents(source) == [(b"cat", 0)] * 2 + [(b"dog", 1)] * 2
    tree.fails["all/dog"] = 1_000
    with pytest.raises(stoker.RemoteError, match=r"tree://all: .*no answer"):
        folder_at("tree://all", timeout_s=0.2)
    with pytest.raises(stoker.RemoteError, match="no answer"):
        files_at("tree://all/**/*.jpg", timeout_s=0)


def test_no_more_is_listed_than_a_pattern_needs(tree: type[Tree]) -> None:
    assert len(files_at("tree://all/cat/*.jpg")) == 2
    assert tree.listed == ["all/cat"]
    tree.listed.clear()
    assert len(files_at("tree://all/*/1.jpg")) == 2
    assert tree.listed == ["all", "all/cat", "all/dog"]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"requests": 0}, ValueError),
        ({"requests": 1.5}, TypeError),
        ({"requests": True}, TypeError),
        ({"timeout_s": -1}, ValueError),
        ({"timeout_s": float("nan")}, ValueError),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], folder: Path) -> None:
    for path in ("http://127.0.0.1:1/", folder):  # for local files, too, where they say nothing
        with pytest.raises(error, match=next(iter(wrong))):
            stoker.from_folder(path, **wrong)


@pytest.mark.parametrize("module", ["fsspec.asyn", "aiohttp"])
def test_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'fsspec\[http,s3\]'"):
        files_at(["http://127.0.0.1:1/a"]).reader()


# -- reading


def test_what_is_expected_is_read_once(url: str, server: Server) -> None:
    with reading(named(url)) as reader:
        reader.expect(range(8))
        assert [e.data for e in reader.fetch([3, 0])] == [b"cat/3.jpg", b"cat/0.jpg"]
        chosen: Any = np.array([7, 1, 2, 4, 5, 6])
        assert [e.path for e in reader.fetch(chosen)] == [f"{url}/{NAMES[at]}" for at in chosen]
        assert server.stats().requests == 8
        reader.fetch([3])  # again, and not expected
        assert server.stats().requests == 9
        reader.expect([3, 3])
        assert [e.data for e in reader.fetch([3, 3, 3])] == [b"cat/3.jpg"] * 3
        assert server.stats().requests == 12
        assert reader.retries == 0


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a stall last: who waits for its end hangs."""
    monkeypatch.setattr(storage, "STALL_S", LONG_S)


@pytest.mark.usefixtures("endless")
def test_expecting_returns_at_once(url: str, server: Server) -> None:
    source = named(url, requests=1, timeout_s=LONG_S)
    server.set_faults(Fault("stall"))
    with reading(source) as reader:
        reader.expect(range(8))


@pytest.mark.parametrize("requests", shortened([3, 1, 8], 1))
def test_requests_under_way_are_bounded(folder: Path, requests: int) -> None:
    names = [f"c/{i}.jpg" for i in range(60)]
    fill(folder, names)
    with serving(folder, latency_s=0.02) as server:
        source = named(server.url, names, requests=requests)
        with reading(source) as reader:
            for _ in range(2):
                for i in range(0, 60, 10):
                    reader.expect(range(i, i + 10))
                reader.fetch(range(60))
        reads = server.stats()
    assert reads.requests == 120
    assert 1 <= reads.peak <= requests
    if requests < 8:
        assert reads.peak == requests


def test_what_was_not_expected_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"c/{i:03}.jpg" for i in range(200)]
    fill(folder, names)
    with serving(folder, latency_s=0.05) as server:
        source = named(server.url, names, requests=1)
        locate, begun = source.locate, []

        def noted(index: int) -> Any:
            if index not in begun:
                begun.append(index)
            return locate(index)

        monkeypatch.setattr(source, "locate", noted)
        with reading(source) as reader:
            reader.expect(range(150))
            reader.fetch([180, 160, 1])
    first = begun.index(180)
    assert begun == [*range(first), 180, 160, *range(first, len(begun) - 2)]
    assert first < 149


def test_threads_share_a_reader(folder: Path, server: Server) -> None:
    names = [f"c/{i:03}.jpg" for i in range(200)]
    fill(folder, names)
    source = named(f"{server.url}/{folder.name}", names, requests=8)
    found: dict[int, bytes] = {}
    with reading(source) as reader:

        def run(first: int) -> None:
            mine = range(first, 200, 4)
            reader.expect(mine)
            for index in mine:
                found[index] = reader.fetch([index])[0].data

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(200)] == [b"c/%03d.jpg" % i for i in range(200)]


def test_a_source_works_behind_a_fork(url: str) -> None:
    source = named(url)
    contents(source)
    with reading(source) as reader:  # with a live one around
        reader.fetch([0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if source.fetch([5])[0].data == b"dog/1.jpg" else 2
                reader.close()  # not this process's to close, and prompt
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert reader.fetch([1])[0].data == b"cat/1.jpg"


# -- failures that pass


@pytest.mark.parametrize("what", [503, 500, 429, 408, 425, "reset", "truncate"])
def test_what_passes_is_tried_again(url: str, server: Server, what: Any) -> None:
    source = named(url, timeout_s=LONG_S)
    server.set_faults(Fault(what, first=2))
    with reading(source) as reader:
        assert [e.data for e in reader.fetch([0, 5])] == [b"cat/0.jpg", b"dog/1.jpg"]
        assert 2 <= reader.retries <= 4  # the session itself retries one reset


def test_a_stall_is_tried_again_until_the_budget_is_spent(
    url: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "STALL_S", 0.3)
    server.set_faults(Fault("stall", first=1))
    with reading(named(url, timeout_s=LONG_S)) as reader:
        assert reader.fetch([5])[0].data == b"dog/1.jpg"
        assert reader.retries >= 1
    server.set_faults(Fault("stall"))
    source = named(url, timeout_s=0.1)
    with reading(source) as reader, pytest.raises(stoker.RemoteError, match=r"no answer for 0.3 s"):
        reader.fetch([5])


def test_a_server_that_returns(folder: Path, url: str) -> None:
    with serving(folder, latency_s=0.02) as server:
        source = named(server.url, timeout_s=LONG_S)
        with reading(source) as reader:
            reader.fetch(range(8))
            reader.expect(range(8))
            server.kill()
            reader.expect(range(8))
            while reader.retries < 8:
                time.sleep(0.01)
            server.start()
            found = reader.fetch([*range(8), *range(8)])
    assert [e.data.decode() for e in found] == NAMES + NAMES


@few(3)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 16))
def test_a_bad_connection_changes_nothing(seed: int, requests: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"c/{i:02}.jpg" for i in range(20)]
        fill(folder, names)
        with serving(folder, seed=seed) as server:
            faults = [Fault(what, rate=0.1) for what in (503, 429, "reset", "truncate")]
            server.set_faults(*faults)
            source = named(server.url, names, requests=requests, timeout_s=LONG_S)
            assert data_of(source) == [name.encode() for name in names]


# -- failures that stay


@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        (503, 503, r"HTTP 503 Service Unavailable after \d+ attempts in [\d.]+ s"),
        ("reset", None, r"after \d+ attempts"),
        ("truncate", None, r"ClientPayloadError.* after \d+ attempts"),
    ],
)
def test_a_spent_budget_names_url_and_status(
    url: str, server: Server, what: Any, status: int | None, message: str
) -> None:
    source = named(url, timeout_s=0.5)
    server.set_faults(Fault(what, path=f"{url.rpartition('/')[2]}/dog/1.jpg"))
    with reading(source) as reader:
        with pytest.raises(stoker.RemoteError, match=message) as caught:
            reader.fetch([5])
        error = caught.value
        assert (error.url, error.status) == (f"{url}/dog/1.jpg", status)
        assert str(error).startswith(f"{url}/dog/1.jpg: ")
        assert error.attempts == reader.retries + 1 > 1
        assert error.elapsed_s >= 0.5
        assert reader.fetch([4, 6])[1].data == b"dog/2.jpg"


def test_no_server_at_all(url: str, folder: Path) -> None:
    with serving(folder) as server:
        source = named(server.url, timeout_s=0.2)
        server.kill()
        with reading(source) as reader:
            with pytest.raises(stoker.RemoteError, match=r"[Cc]onnect") as got:
                reader.fetch([5])
            assert got.value.status is None


@pytest.mark.parametrize("status", [400, 401, 403])
def test_what_stays_is_raised_at_once(url: str, server: Server, status: int) -> None:
    source = named(url, timeout_s=LONG_S)
    server.set_faults(Fault(status))
    with reading(source) as reader:
        with pytest.raises(stoker.RemoteError, match=f"HTTP {status} ") as caught:
            reader.fetch([5])
        assert (caught.value.attempts, reader.retries) == (1, 0)


def test_errors_survive_pickling() -> None:
    error = stoker.RemoteError("http://x/y", "HTTP 503", status=503, attempts=6, elapsed_s=60.02)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "http://x/y: HTTP 503 after 6 attempts in 60 s"
    assert vars(again) == vars(error)


def test_asking_one_by_one_reads_nothing_twice(url: str, server: Server) -> None:
    source = named(url, timeout_s=LONG_S)
    server.set_faults(Fault(404, path=f"{url.rpartition('/')[2]}/cat/2.jpg"))
    with reading(source) as reader:
        with pytest.raises(FileNotFoundError):
            reader.fetch(range(8))
        for index in (7, 6, 5, 4, 3, 1, 0):
            assert reader.fetch([index])
        with pytest.raises(FileNotFoundError):
            reader.fetch([2])
        assert server.stats().requests == 8


# -- the end


@pytest.mark.usefixtures("endless")
def test_closing_gives_up_what_is_under_way(url: str, server: Server) -> None:
    source = named(url, requests=4, timeout_s=LONG_S)
    server.set_faults(Fault("stall"))
    reader = reader_of(source)
    reader.expect(range(8))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            reader.fetch([0, 7])
        except RuntimeError as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while server.stats().requests < 4:
        time.sleep(0.01)
    reader.close()
    for thread in threads:
        thread.join()
    assert [str(error) for error in raised] == ["the reader is closed"] * 3
    with pytest.raises(RuntimeError, match="closed"):
        reader.fetch([1])
    reader.expect([1])
    reader.close()


def test_closing_before_anything_was_read_and_while_it_waits_to_try_again(
    url: str, server: Server
) -> None:
    source = named(url, timeout_s=LONG_S)
    reader_of(source).close()
    server.set_faults(Fault(503))
    with reading(source) as reader:
        reader.expect(range(8))
        while reader.retries < 20:
            time.sleep(0.01)


def test_a_finaliser_may_close_it_in_any_thread(url: str, server: Server) -> None:
    class Owner:
        pass

    source = named(url)
    server.set_faults(Fault("stall"))
    for collect in (gc.collect, partial(on_the_loop, gc.collect)):
        owner = Owner()
        owner.itself = owner  # type: ignore[attr-defined]
        reader = reader_of(source)
        reader.expect(range(8))
        weakref.finalize(owner, reader.close)
        del owner
        collect()
        with pytest.raises(RuntimeError, match="closed"):
            reader.fetch([0])
        reader.close()


def on_the_loop(function: Callable[[], object]) -> None:
    done = threading.Event()

    def run() -> None:
        function()
        done.set()

    fsspec.asyn.get_loop().call_soon_threadsafe(run)
    assert done.wait(200)


def test_nothing_is_left_of_many_readers(url: str, server: Server) -> None:
    others = set(threading.enumerate())  # those of tests before
    source = named(url)
    contents(source)
    gc.collect()
    before = open_descriptors()
    for _ in range(10):
        contents(source)
        reader = reader_of(source)
        reader.expect(range(8))
        reader.close()
    gc.collect()
    assert open_descriptors() <= before
    threads = {thread.name for thread in set(threading.enumerate()) - others}
    assert threads <= {"fsspecIO"}


# -- through pipelines


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (3, "thread"), (2, "process")])
def test_a_pipeline_streams_what_a_local_one_streams(
    url: str, folder: Path, workers: int, kind: str
) -> None:
    def streamed(place: Any, workers: int, kind: str) -> list[Any]:
        files = [f"{place}/{name}" for name in NAMES]
        pipeline = stoker.from_files(files, seed=1).shuffle().map(bytes.upper, on="data").batch(3)
        pipeline = pipeline.workers(workers, kind=kind)
        return [list(batch.data) for _ in range(2) for batch in pipeline]

    assert streamed(url, workers, kind) == streamed(folder, 0, "thread")


def test_a_pipeline_reads_ahead(folder: Path) -> None:
    fill(folder, [f"{i:02}.jpg" for i in range(100)])
    with serving(folder, latency_s=0.05) as server:
        batches = iter(stoker.from_files(f"{server.url}/{{00..99}}.jpg", requests=12).batch(10))
        with batches:
            next(batches)
        assert server.stats().peak > 6
        assert server.stats().peak <= 12


def test_a_pipeline_names_the_file_that_vanished(url: str, folder: Path) -> None:
    pipeline = stoker.from_files(f"{url}/{{cat,dog}}/{{0..3}}.jpg").batch(4)
    (folder / "dog" / "1.jpg").unlink()
    with iter(pipeline) as batches:
        assert len(next(batches).data) == 4
        with pytest.raises(stoker.StageError, match=r"example 5 \(http.*dog/1\.jpg\)") as caught:
            next(batches)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.usefixtures("endless")
def test_leaving_a_pipeline_while_the_server_stalls(url: str, server: Server) -> None:
    files = f"{url}/{{cat,dog}}/{{0..3}}.jpg"
    pipeline = stoker.from_files(files, requests=2, timeout_s=LONG_S).batch(1)
    server.set_faults(Fault("stall", path=f"{url.rpartition('/')[2]}/cat/3.jpg"))
    with iter(pipeline) as batches:
        assert next(batches).data == [b"cat/0.jpg"]


# -- lists of files, and patterns


def files(source: FilesSource) -> list[File]:
    fetched: list[File] = source.fetch(range(len(source)))
    return fetched


def test_local_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    names = [f"{n}.bin" for n in AWKWARD]
    fill(folder, names)
    paths = [str(folder / name) for name in names]
    source = files_at([Path(paths[0]), *paths[1:]])
    assert source.reader() is None
    assert source.fields == ("path", "data")
    assert source.path(3) == paths[3]
    assert source.name == f"from_files({len(paths)} files)"
    assert files(source) == [
        (path, os.fsencode(name)) for path, name in zip(paths, names, strict=True)
    ]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        files_at([folder / "nowhere"]).fetch([0])


TREE = ["a.bin", "b.txt", "x/c.bin", "x/y/d.bin", ".h/e.bin", "x/.f.bin", "x/y/[g].bin"]
PATTERNS = {
    "*.bin": ["a.bin"],
    "**/*.bin": ["a.bin", "x/c.bin", "x/y/[g].bin", "x/y/d.bin"],
    "x/**/*.bin": ["x/c.bin", "x/y/[g].bin", "x/y/d.bin"],
    "*/*.bin": ["x/c.bin"],
    "x/*/d.*": ["x/y/d.bin"],
    "[ab].*": ["a.bin", "b.txt"],
    ".h/*.bin": [".h/e.bin"],
    "x/y/*g*": ["x/y/[g].bin"],
    "a.bin": ["a.bin"],
}


@pytest.mark.parametrize("where", ["local", "memory", "file"])
def test_patterns(folder: Path, where: str) -> None:
    fill(folder, TREE)
    base = {"local": str(folder), "memory": remember(folder), "file": f"file://{folder}"}[where]
    for pattern, names in PATTERNS.items():
        source = files_at(f"{base}/{pattern}")
        assert [e.data.decode() for e in files(source)] == names, pattern
        assert [e.path for e in files(source)] == [f"{base}/{name}" for name in names], pattern
    if where == "local":
        assert [e.data for e in files(files_at(f"{base}/?.bin"))] == [b"a.bin"]


@pytest.mark.parametrize("pattern", ["*.jpg", "a.jpg", "**/*.jpg"])
def test_a_pattern_that_nothing_fits(folder: Path, pattern: str) -> None:
    fill(folder / "empty", ["x.bin"])
    bases = [str(folder), remember(folder)] if "*" in pattern else [str(folder)]
    for base in bases:
        with pytest.raises(FileNotFoundError, match="no file fits"):
            files_at(f"{base}/empty/{pattern}")


def test_urls_are_sent_as_they_stand(server: Server, folder: Path) -> None:
    fill(folder, ["a b.bin", "c+d.bin", "%41.bin", "ü.bin"])
    base = f"{server.url}/{folder.name}"
    urls = [
        f"{base}/a b.bin",
        f"{base}/a%20b.bin",
        f"{base}/%2541.bin?X-Signature=%2F%3D+",
        f"{base}/ü.bin",
        f"{base}/c%2Bd.bin#part",
    ]
    source = files_at(urls)
    found = files(source)
    assert [e.path for e in found] == urls
    assert [e.data.decode() for e in found] == ["a b.bin"] * 2 + ["%41.bin", "ü.bin", "c+d.bin"]


def test_lists_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="one file system, not from local paths, http://"):
        files_at(["a", "http://x/b"])
    with pytest.raises(ValueError, match="at least one file"):
        files_at([])
    for unordered in ({"a"}, (name for name in "ab")):
        with pytest.raises(TypeError, match=r"sorted\(\.\.\.\)"):
            stoker.from_files(unordered)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not bytes"):
        files_at([b"a"])


# -- other file systems


def test_a_file_that_vanished_or_is_not_as_long_as_listed(folder: Path) -> None:
    fill(folder, ["c/1.jpg", "c/2.jpg"])
    remember(folder)
    source = folder_at(f"memory://{folder}", timeout_s=0.2)
    fsspec.filesystem("memory").pipe_file(f"{folder}/c/2.jpg", b"cut")
    assert source.fetch([0])
    with pytest.raises(stoker.RemoteError, match="3 bytes instead of the 7 listed after"):
        source.fetch([1])
    source = folder_at(f"file://{folder}", timeout_s=LONG_S)
    (folder / "c" / "2.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"file://.*c/2\.jpg"):
        source.fetch([1])


class Numbers(AbstractFileSystem):  # type: ignore[misc]
    """A million files, in two classes, as an object store lists them."""

    protocol = "numbers"
    count = 1_000_000 if FULL else 100_000

    def find(self, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        names = (f"{path}/{('even', 'odd')[i % 2]}/{i:07}.jpg" for i in range(self.count))
        return {name: {"name": name, "type": "file", "size": 7} for name in names}

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        return path.rpartition("/")[2][:7].encode()


class Hanging(Numbers):
    """Files of which one never comes."""

    protocol = "hanging"
    count = 10
    release = threading.Event()

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        if path.endswith("0000003.jpg"):
            self.release.wait(60)
        return super().cat_file(path)


def test_a_file_system_without_coroutines_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    source = folder_at("hanging://all", timeout_s=0.1)
    reader = reader_of(source)
    assert reader.fetch([0, 7]) == [(b"0000000", 0), (b"0000005", 1)]
    monkeypatch.setattr(storage, "STALL_S", 0.3)
    try:
        with pytest.raises(stoker.RemoteError, match=r"not read in 0\.3 s") as caught:
            reader.fetch([6])
        assert caught.value.url == "hanging://all/odd/0000003.jpg"
        reader.expect([6])
        reader.close()
    finally:
        Hanging.release.set()
    with pytest.raises(RuntimeError, match="closed"):
        reader.fetch([6])


def test_a_large_listing_is_small_and_quick_to_copy() -> None:
    fsspec.register_implementation("numbers", Numbers, clobber=True)
    source = folder_at("numbers://all")
    assert len(source) == Numbers.count
    assert source.fetch([0, 1, len(source) - 1]) == [
        (b"0000000", 0), (b"0000002", 0), (b"%07d" % (Numbers.count - 1), 1)
    ]  # fmt: skip
    assert source.path(len(source) // 2) == "numbers://all/odd/0000001.jpg"
    assert len(pickle.dumps(source, 5)) < 40 * Numbers.count
