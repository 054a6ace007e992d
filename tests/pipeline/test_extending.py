"""A source and stages of another package stand wherever stoker's own stand, with the same streams.

``tests/other_package`` is that package. What it makes is compared with what stoker's own source and
steps make of the same examples.
"""

from __future__ import annotations

import ast
import atexit
import functools
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stoker_lmdb
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import stoker
from command_line import python
from stoker import sources
from stoker.sources import Indices
from stoker.testing import check_resume
from strategies import few, frozen, opened, stream, through_json

PACKAGE = Path(stoker_lmdb.__file__).parent
PUBLIC = {"stoker", "stoker.sources", "stoker.stages", "stoker.testing"}
MOST = 40
AS_SET: dict[str, Any] = {"dump": sorted, "load": set}
PICKLED: dict[str, Any] = {"dump": pickle.dumps, "load": pickle.loads}


def numbered(key: bytes, value: bytes) -> tuple[int, NDArray[np.float64]]:
    return int(key), np.frombuffer(value).copy()


def value_of(number: int) -> NDArray[np.float64]:
    return np.array([number % 13, number, -number], np.float64)


@functools.cache
def values_in(examples: int) -> str:
    """Return a table of so many examples; it is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="stoker-lmdb-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    items = ((b"%04d" % number, value_of(number).tobytes()) for number in range(examples))
    stoker_lmdb.write_lmdb(folder, items)
    return folder


@stoker.thread_safe
class Examples:
    """What is in the table, as a dataset."""

    def __init__(self, examples: int) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> tuple[int, NDArray[np.float64]]:
        return index, value_of(index)


def key_of(example: Any) -> float:
    return float(example[1][0])


def deduplicated(seen: set[float], example: Any) -> tuple[set[float], Any]:
    key = key_of(example)
    if key in seen:
        return seen, stoker.DROP
    return seen | {key}, example


def windowed(size: int, stride: int) -> Any:
    """Return what makes windows with a scan: its state has all examples so far."""

    def step(before: list[Any], example: Any) -> tuple[list[Any], Any]:
        seen = [*before, example]
        first = len(seen) - size
        if first < 0 or first % stride:
            return seen, stoker.DROP
        return seen, stoker_lmdb.Windows(size).make(seen[first:])

    return step


@stoker.thread_safe
def is_kept(number: int) -> bool:
    return number % 5 > 0


@stoker.thread_safe
def failing(number: int) -> int:
    if number % 11 == 7:
        raise ValueError("one of those")
    return number


@stoker.thread_safe
def noisy(x: Any, rng: np.random.Generator) -> Any:
    x += rng.random(x.shape)
    return x


@dataclass(frozen=True)
class Built:
    """A pipeline: of the other package's parts, or (``own``) of stoker's."""

    examples: int
    batch: int
    shuffle: bool = True
    shard: tuple[int, int] | None = None
    take: bool = False
    cache: bool = False
    filtered: bool = False
    skips: bool = False
    dedup: bool = False
    windows: tuple[int, int] | None = None
    echo: Any = None
    batch_echo: bool = False
    mixed: bool = False

    def pipeline(self, *, own: bool = False) -> stoker.Pipeline[Any]:
        budget = self.examples if self.skips else 0
        if own:
            made = stoker.from_dataset(Examples(self.examples), seed=3, max_errors=budget)
        else:
            made = stoker_lmdb.from_lmdb(
                values_in(self.examples), numbered, seed=3, max_errors=budget
            )
        if self.mixed:
            made = made.shuffle().map(_twice, on=1) if own else self._applied(made.shuffle())
            other = stoker.from_dataset(Examples(9), seed=3, max_errors=budget)
            made = stoker.mix([made, other], weights=[2, 1], max_errors=budget)
        if self.shard is not None:
            rank, world = self.shard
            remainder: Any = "drop" if self.mixed else "uneven"
            made = made.shard(rank=rank, world_size=world, remainder=remainder)
        if self.shuffle and not self.mixed:
            made = made.shuffle()
        if self.take and not self.skips:
            made = made.take(max(1, self.examples // 2))
        if self.cache:
            made = made.cache("1MiB")
        if self.filtered:
            made = made.filter(is_kept, on=0)
        if self.skips:
            made = made.map(failing, on=0)
        if self.dedup and own:
            made = made.scan(deduplicated, set(), **AS_SET)
        elif self.dedup:
            made = made.apply(stoker_lmdb.Dedup(key_of))
        if self.windows is not None and own:
            made = made.scan(windowed(*self.windows), [], **PICKLED)
        elif self.windows is not None:
            made = made.apply(stoker_lmdb.Windows(*self.windows))
        made = made.map(_twice, on=1) if own else self._applied(made)
        if self.echo is not None:
            made = made.echo(self.echo, pool=3 * self.batch + 4)
        made = made.random_map(noisy, on=1).batch(self.batch)
        if self.batch_echo:
            made = made.echo(1.5, pool=3)
        return made

    @staticmethod
    def _applied(pipeline: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
        return pipeline.apply(stoker_lmdb.Doubled(1))


def _twice(x: Any) -> Any:
    return x * 2


@st.composite
def builts(draw: st.DrawFn) -> Built:
    flag = st.booleans()
    world = draw(st.sampled_from([1, 1, 2, 3]))
    examples = draw(st.sampled_from([7, 20, MOST]))
    mixed = draw(st.sampled_from([False, False, True]))
    # Parts of ranks of a mixture are equal, which nothing must change.
    leaves_out = flag if world == 1 or not mixed else st.just(False)
    echo = draw(st.sampled_from([None, 1, 1.5, 3]))
    return Built(
        examples,
        draw(st.integers(1, 6)),
        shuffle=draw(flag),
        shard=None if world == 1 else (draw(st.integers(0, world - 1)), world),
        take=draw(flag),
        cache=draw(flag),
        filtered=draw(leaves_out),
        skips=draw(leaves_out),
        dedup=draw(leaves_out),
        windows=draw(st.sampled_from([None, (1, 3), (3, 1), (3, 2)])) if draw(leaves_out) else None,
        echo=echo,
        batch_echo=echo is None and draw(flag),
        mixed=mixed,
    )


# -- the same streams


@pytest.mark.full
@few(60)
@given(built=builts(), workers=st.sampled_from([0, 1, 4]))
def test_the_stream_is_that_of_stokers_own_for_any_threads(built: Built, workers: int) -> None:
    expected = stream(built.pipeline(own=True).workers(0))
    assert stream(built.pipeline().workers(workers)) == expected


@pytest.mark.full
@few(5)
@given(built=builts())
def test_the_stream_is_the_same_from_worker_processes(built: Built) -> None:
    expected = stream(built.pipeline(own=True).workers(0))
    made = built.pipeline().workers(2, kind="process")
    assert stream(made) == expected
    stream(made)  # and a second epoch
    del made


@pytest.mark.full
@few(6)
@given(built=builts(), workers=st.sampled_from([0, 2]))
def test_a_run_resumes_at_every_batch(built: Built, workers: int) -> None:
    check_resume(lambda: built.pipeline().workers(workers))


@few(10)
@given(built=builts())
def test_states_of_one_fit_the_other_where_the_source_is_not_compared(built: Built) -> None:
    """A stage of one's own is saved as the steps that it is made of."""
    made = replace(built, mixed=False).pipeline()
    own = replace(built, mixed=False).pipeline(own=True)
    saved, other = made.state_dict(), own.state_dict()
    more = 1 + (built.windows is not None)  # two maps in place of one; windows, and a map
    assert len(opened(saved)["pipeline"]) == len(opened(other)["pipeline"]) + more
    assert opened(saved)["pipeline"][0].startswith("LmdbTable of ")


@pytest.mark.parametrize("workers", [1, 3])
def test_an_echo_that_follows_the_stall_can_be_replayed(workers: int) -> None:
    def auto() -> stoker.Pipeline[Any]:
        table = stoker_lmdb.from_lmdb(values_in(MOST), numbered, seed=3).shuffle()
        table = table.apply(stoker_lmdb.Dedup(key_of)).apply(stoker_lmdb.Windows(3)).echo()
        return table.apply(stoker_lmdb.Doubled(1)).random_map(noisy, on=1).batch(3).steps(4)

    train = auto().workers(workers)
    with iter(train) as batches:
        found = [next(batches) for _ in range(2)]
        state = through_json(train.state_dict())
        found += batches
    again = auto().replay(train.record()).workers(0)
    whole = stream(again)
    assert len(whole) == len(found) == 4
    again = auto().replay(train.record()).workers(0)
    again.load_state_dict(state)
    assert stream(again) == whole[2:]


def test_a_copy_of_a_source_and_of_a_stage_does_the_same() -> None:
    table = pickle.loads(pickle.dumps(stoker_lmdb.LmdbTable(values_in(7), numbered)))
    stage = pickle.loads(pickle.dumps(stoker_lmdb.Dedup(key_of)))
    pipeline = stoker.from_dataset(table, seed=1).apply(stage)
    assert [number for number, _ in pipeline] == list(range(7))


def test_a_forked_child_reads_the_table() -> None:
    pipeline = Built(MOST, 4, dedup=True).pipeline().workers(2)
    expected = stream(pipeline)
    pipeline.set_epoch(0)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        same = b"different"
        try:
            same = b"same" if stream(pipeline) == expected else same
        finally:
            os.write(theirs, same)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(ours, 20) == b"same"
    for end in (ours, theirs):
        os.close(end)


# -- feeds

SERVED = """
    import sys
    sys.path[:0] = [{package!r}]
    import numpy as np
    import stoker_lmdb

    def numbered(key, value):
        return int(key), np.frombuffer(value).copy()

    def key_of(example):
        return float(example[1][0])

    def batches():
        table = stoker_lmdb.from_lmdb({table!r}, numbered, seed=3).shuffle()
        table = table.apply(stoker_lmdb.Dedup(key_of)).apply(stoker_lmdb.Windows(3))
        return table.apply(stoker_lmdb.Doubled(1)).batch(4)

    def examples():
        return stoker_lmdb.from_lmdb({table!r}, numbered, seed=3).shuffle()
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """Return what starts ``stoker feed`` with a function of a script, and returns its name."""
    script = tmp_path / "prepare.py"
    text = SERVED.format(package=str(PACKAGE.parent), table=values_in(MOST))
    script.write_text(textwrap.dedent(text))
    feeders: list[subprocess.Popen[bytes]] = []

    def start(function: str) -> str:
        name = f"extending-{os.getpid()}-{function}"
        stoker_command = "from stoker.cli import main; main()"
        command = [sys.executable, "-c", stoker_command, "feed", f"{script}:{function}"]
        feeders.append(subprocess.Popen([*command, "--name", name], stdout=subprocess.DEVNULL))
        end = time.monotonic() + 200
        while True:
            try:
                stoker.from_feed(name)
                return name
            except stoker.FeedError:
                assert time.monotonic() < end
                assert feeders[-1].poll() is None
                time.sleep(0.05)

    yield start
    for feeder in feeders:
        feeder.terminate()
        feeder.wait(200)


def test_a_feed_serves_them(served: Any) -> None:
    table = stoker_lmdb.from_lmdb(values_in(MOST), numbered, seed=3).shuffle()
    table = table.apply(stoker_lmdb.Dedup(key_of)).apply(stoker_lmdb.Windows(3))
    table = table.apply(stoker_lmdb.Doubled(1)).batch(4)
    expected = stream(table)
    name = served("batches")
    assert stream(stoker.from_feed(name)) == expected
    feed = stoker.from_feed(name)
    found, states = [], []
    for batch in feed:
        found.append(frozen(batch))
        states.append(through_json(feed.state_dict()))
    for number, state in enumerate(states[:-1], 1):
        again = stoker.from_feed(name)
        again.load_state_dict(state)
        assert stream(again) == found[number:]


def test_what_comes_from_a_feed_goes_through_a_stage(served: Any) -> None:
    name = served("examples")

    def job() -> stoker.Pipeline[Any]:
        feed = stoker.from_feed(name, seed=3).apply(stoker_lmdb.Dedup(key_of))
        feed = feed.apply(stoker_lmdb.Windows(3)).apply(stoker_lmdb.Doubled(1))
        return feed.random_map(noisy, on=1).batch(4)

    expected = stream(Built(MOST, 4, dedup=True, windows=(3, 1)).pipeline(own=True).workers(0))
    assert stream(job()) == expected


# -- caches

CACHED = """
    import sys
    sys.path[:0] = [{package!r}]
    import stoker, stoker_lmdb
    table = stoker_lmdb.from_lmdb({table!r}, seed=0).cache("4MiB", path={store!r}).workers(0)
    print(sum(map(len, table)), table.stats().cache.hits, table.stats().cache.items)
"""


def test_a_cache_knows_the_examples_again_until_the_table_changes(tmp_path: Path) -> None:
    table, store = str(tmp_path / "table"), str(tmp_path / "store")

    def run(script: str) -> list[int]:
        text = textwrap.dedent(script.format(package=str(PACKAGE.parent), table=table, store=store))
        done = python("-W", "error", "-c", text)
        assert done.returncode == 0, done.stderr
        return [int(word) for word in done.stdout.split()]

    stoker_lmdb.write_lmdb(table, [(b"%d" % n, b"x" * 50) for n in range(8)])
    assert run(CACHED) == [400, 0, 8]
    assert run(CACHED) == [400, 8, 8]
    stoker_lmdb.write_lmdb(table, [(b"5", b"y" * 60)])
    assert run(CACHED)[:2] == [410, 0]


def test_a_source_that_cannot_say_which_data_it_reads_needs_a_version(tmp_path: Path) -> None:
    class Plain(stoker.Source[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ValueError, match="cannot check that from_dataset"):
        stoker.from_dataset(Plain()).cache("1MiB", path=tmp_path)
    for hits in (0, 4):
        plain = stoker.from_dataset(Plain()).cache("1MiB", path=tmp_path, version="1").workers(0)
        assert list(plain) == [0, 1, 2, 3]
        cached = plain.stats().cache
        assert cached is not None
        assert cached.hits == hits


# -- the package is somebody else's


def test_the_package_imports_nothing_private() -> None:
    files = sorted(PACKAGE.glob("*.py"))
    assert len(files) == 4
    for file in files:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
                names = [alias.name for alias in node.names]
                public: Any = sys.modules.get(node.module or "")
                if modules[0].split(".")[0] == "stoker":
                    assert set(names) <= set(public.__all__), file
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("stoker."):
                assert node.attr in stoker.__all__, file
            ours = [each for each in modules if each.split(".")[0] == "stoker"]
            assert set(ours) <= PUBLIC, file


def test_what_is_public_resolves_and_is_sorted() -> None:
    import stoker.stages

    for module in (sources, stoker.stages):
        assert all(hasattr(module, name) for name in module.__all__)
        assert list(module.__all__) == sorted(module.__all__, key=str.lower)
    with pytest.raises(AttributeError, match="no attribute 'Else'"):
        _ = sources.Else  # type: ignore[attr-defined]


# -- what a source may know


class Letters(stoker.Source[str]):
    """Ten examples, of two methods."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> str:
        return "abcdefghij"[index]


def test_two_methods_make_a_source() -> None:
    train = stoker.from_dataset(Letters(), seed=0).batch(3)
    assert next(iter(train)) == ["a", "b", "c"]
    assert len(train) == 4
    assert str(train).startswith("from_dataset(Letters)  10 examples")
    with pytest.raises(TypeError, match="abstract"):
        NoLength()  # type: ignore[abstract]


class NoLength(stoker.Source[str]):
    def __getitem__(self, index: int) -> str:
        return ""


class Described(Letters):
    """Says all that a source can say to people."""

    fields = ("a", "b")  # type: ignore[assignment]
    class_names = ("vowel", "other")  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return "letters()"

    def path(self, index: int) -> str:
        return f"letter {index}"

    def extent(self) -> str:
        return "all letters up to j"

    def signature(self) -> str:
        return "letters up to j"


def test_what_it_says_is_shown() -> None:
    train = stoker.from_dataset(Described(), seed=0)
    assert str(train).startswith("letters()  all letters up to j")
    assert train.class_names == ["vowel", "other"]
    assert opened(train.state_dict())["pipeline"] == ["letters up to j"]
    with pytest.raises(LookupError, match=r"no field 'c'; the examples of letters\(\) have"):
        train.map(str, on="c")
    with pytest.raises(stoker.StageError, match=r"example 0 \(letter 0\)") as raised:
        list(train.map(int).workers(0))
    assert (raised.value.index, raised.value.path) == (0, "letter 0")


@stoker.thread_safe
class Squares(stoker.Source[Any], sources.Rows):
    """Rows in arrays, in blocks of five."""

    prefers_blocks = False

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.int64(index), np.full(3, index * index, np.float32)

    @property
    def rows(self) -> sources.Rows:
        return self

    @property
    def blocks(self) -> Any:
        return np.arange(5, 101, 5)

    def allocate(self, rows: int, recycler: sources.Allocator) -> Any:
        return recycler.array((rows,), np.int64), recycler.array((rows, 3), np.float32)

    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        numbers, squares = batch
        numbers[start : start + len(indices)] = indices
        squares[start : start + len(indices)] = (indices * indices)[:, None]


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("block", [None, True])
def test_rows_are_gathered_into_the_batches_of_single_examples(
    workers: int, block: bool | None
) -> None:
    squares = stoker.from_dataset(Squares(), seed=1).shuffle(block=block).workers(workers)
    each = stoker.from_dataset(Squares(), seed=1).shuffle(block=block).map(_same).workers(0)
    assert stream(squares.batch(8)) == stream(each.batch(8))
    check_resume(lambda: squares.batch(8), every=4)


@stoker.thread_safe
def _same(example: Any) -> Any:
    return example


class Ahead(Letters):
    """Notes what was expected."""

    def __init__(self) -> None:
        self.expected: list[int] = []
        self.closed = 0

    def reader(self, selection: Any = None) -> sources.Reader:
        return Taken(self)


class Taken:
    """The reader."""

    requests = 4

    def __init__(self, source: Ahead) -> None:
        self._source = source

    def expect(self, indices: Indices) -> None:
        self._source.expected += [int(index) for index in indices]

    def fetch(self, indices: Indices) -> list[str]:
        return [self._source[int(index)] for index in indices]

    def close(self) -> None:
        self._source.closed += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reader_is_told_what_will_be_read(workers: int) -> None:
    source = Ahead()
    train = stoker.from_dataset(source, seed=2).shuffle().batch(2).workers(workers)
    assert sorted(itertools.chain(*train)) == list("abcdefghij")
    assert sorted(source.expected) == list(range(10))
    assert source.closed == 1


class Ranges(sources.ReadsRanges[bytes]):
    """Three bytes each, of a file at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.access = sources.Access(url, sources.RemoteOptions(requests=3))

    def __len__(self) -> int:
        return 10

    def locate(self, index: int) -> sources.RemoteFile:
        return sources.RemoteFile(self.url, 3, 3 * index)

    def example(self, index: int, data: bytes) -> bytes:
        return data


@pytest.mark.parametrize("workers", [0, 2])
def test_ranges_of_a_file_are_read_ahead(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "records.bin"
    file.write_bytes(b"".join(b"%03d" % number for number in range(10)))
    ranges = Ranges(f"file://{file}")
    assert ranges[4] == b"004"
    train = stoker.from_dataset(ranges, seed=2).shuffle().batch(2).workers(workers)
    assert sorted(map(int, itertools.chain(*train))) == list(range(10))


class Shared(Letters):
    """Seeks in one open file, as only one thread at a time can."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        self._file.seek(4 * index)
        return self._file.read(4)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_each_worker_has_a_source_of_its_own(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(b"".join(b"%04d" % number for number in range(200)))
    with file.open("rb") as opened:
        train = stoker.from_dataset(Shared(opened), seed=0).shuffle().batch(7)
        assert stream(train.workers(3, kind=kind)) == stream(train.workers(0))


# -- what a source does wrong


class Fingered(Letters):
    def identity(self) -> Any:
        return "letters"

    def fingerprint(self, index: int) -> Any:
        return f"number {index}"


class Unidentified(Letters):
    def identity(self) -> Any:
        return 5


class Short(Letters):
    def fetch(self, indices: Indices) -> list[str]:
        return ["a"] * (len(indices) + 1)


class Nothing(Short):
    def fetch(self, indices: Indices) -> Any:
        return None


class Misblocked(Letters):
    blocks = np.array([4, 9])  # type: ignore[assignment]


class Readerless(Letters):
    def reader(self, selection: Any = None) -> Any:
        return object()


class Undeclared(Squares):
    pass


@stoker.thread_safe
class Rowless(Letters):
    rows = "rows"  # type: ignore[assignment]


class Failing(Letters):
    def __getitem__(self, index: int) -> str:
        if index == 3:
            raise OSError("the disk is gone")
        return super().__getitem__(index)

    def path(self, index: int) -> str:
        return f"disk 1, {index}"


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a fingerprint": (
        lambda p: p(Fingered()).cache("1MiB"),
        stoker.StageError,
        r"fingerprint\(0\) of from_dataset\(Fingered\) returned str 'number 0': return a "
        r"stoker.sources.Fingerprint",
    ),
    "an identity": (
        lambda p: p(Unidentified()).cache("1MiB"),
        TypeError,
        r"from_dataset\(Unidentified\): identity\(\) returned int 5: return a text",
    ),
    "too many": (lambda p: p(Short()), stoker.StageError, "2 examples came, and 1 were asked for"),
    "no list": (lambda p: p(Nothing()), stoker.StageError, r"fetch\(\) returned NoneType None"),
    "blocks": (
        lambda p: p(Misblocked()).shuffle(),
        ValueError,
        r"blocks of from_dataset\(Misblocked\) are no ends of blocks: .* the last one 10",
    ),
    "a reader": (
        lambda p: p(Readerless()),
        TypeError,
        r"reader\(\) of from_dataset\(Readerless\) returned object .* has no requests and",
    ),
    "rows for threads": (
        lambda p: p(Undeclared()),
        TypeError,
        "several threads gather rows of Undeclared at once: .* @stoker.thread_safe above class",
    ),
    "rows": (
        lambda p: p(Rowless()).batch(2),
        TypeError,
        r"rows of from_dataset\(Rowless\) are str 'rows', not stoker.sources.Rows",
    ),
    "an error": (
        lambda p: p(Failing()),
        stoker.StageError,
        r"Failing.*3.*disk 1, 3.*the disk is gone",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_wrong_is_named(what: str, workers: int) -> None:
    build, error, says = WRONG[what]
    with pytest.raises(error, match=f"(?s){says}"):
        list(build(lambda data: stoker.from_dataset(data, seed=0)).workers(workers))


def test_an_error_of_a_source_counts_against_the_budget() -> None:
    train = stoker.from_dataset(Failing(), seed=0, max_errors=1)
    assert list(train) == list("abcefghij")
    assert train.stats().skipped_examples == 1


class Growing(Letters):
    def __init__(self) -> None:
        self.length = 10

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(f"there are only {self.length}")
        return index


# -- what a stage does wrong


@dataclass(frozen=True)
class Lowered(stoker.Stage):
    """Lowers itself as it is told."""

    how: Any

    def lower(self, pipeline: stoker.Pipeline[Any]) -> Any:
        return self.how(pipeline)

    def describe(self) -> str:
        return "lowered"


MISLOWERED = {
    "nothing": lambda p: None,
    "a number": lambda p: 5,
    "workers": lambda p: p.map(_same).workers(0),
    "steps": lambda p: p.steps(3),
    "another pipeline": lambda p: stoker.from_dataset([1, 2]).map(_same),
}


@pytest.mark.parametrize("how", MISLOWERED)
def test_a_stage_only_adds_steps(how: str) -> None:
    with pytest.raises(TypeError, match=r"lower\(\) of lowered returned something else than"):
        stoker.from_dataset(Letters()).apply(Lowered(MISLOWERED[how]))


def test_only_stages_are_applied() -> None:
    with pytest.raises(TypeError, match=r"\.apply\(\) takes a stoker.Stage, not function"):
        stoker.from_dataset(Letters()).apply(_same)  # type: ignore[arg-type]


def test_the_checks_of_a_stage_and_of_its_steps_speak_up() -> None:
    batched = stoker.from_dataset(Letters()).batch(2)
    with pytest.raises(ValueError, match=r"dedup looks at single examples: put it before"):
        batched.apply(stoker_lmdb.Dedup(key_of))
    echoed = stoker.from_dataset(Letters()).echo(2)
    with pytest.raises(ValueError, match=r"\.scan\(\) cannot follow echo\(2\)"):
        echoed.apply(stoker_lmdb.Dedup(key_of))
    after = stoker.from_dataset(Letters()).apply(stoker_lmdb.Dedup(key_of))
    with pytest.raises(ValueError, match=r"\.cache\(\) cannot follow dedup\(key_of\): scan"):
        after.cache("1MiB")


def test_errors_and_print_name_the_stage() -> None:
    train = stoker.from_dataset(Letters(), seed=0).apply(stoker_lmdb.Dedup(key_of)).batch(2)
    assert ".dedup(key_of): scan(step)  one example at a time" in str(train)
    with pytest.raises(stoker.StageError) as raised:
        list(train)
    assert raised.value.stage == "dedup(key_of): scan(step)"
    nested = stoker.from_dataset([1.0]).apply(Lowered(lambda p: p.apply(Lowered(_mapped))))
    assert ".lowered: lowered: map(_same)" in str(nested)


def _mapped(pipeline: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
    return pipeline.map(_same)


@dataclass(frozen=True)
class Halves(stoker.Stage):
    """Every second example; says so."""

    says: bool = True

    def lower(self, pipeline: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
        return pipeline.map(_same).filter(self.is_kept).map(_same)

    @stoker.thread_safe
    def is_kept(self, number: int) -> bool:
        return number % 2 == 0

    def count(self, items: int) -> int | None:
        return (items + 1) // 2 if self.says else None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stage_says_what_its_steps_leave_open(workers: int) -> None:
    train = stoker.from_dataset(range(20), seed=0).apply(Halves()).echo(2, pool=9).batch(3)
    train = train.workers(workers)
    assert len(train) == len(list(train)) == 7
    twice = stoker.from_dataset(range(20), seed=0).take(9).apply(Lowered(_halves))
    assert len(twice) == len(list(twice)) == 5
    with pytest.raises(TypeError, match="not known"):
        len(stoker.from_dataset(range(20)).apply(Halves(says=False)))
    with pytest.raises(TypeError, match="not known"):
        len(stoker.from_dataset(range(20)).apply(Halves()).filter(bool))
    check_resume(lambda: stoker.from_dataset(range(20), seed=0).apply(Halves()).batch(3))


def _halves(pipeline: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
    return pipeline.apply(Halves())


def test_a_stage_stays_where_the_data_grows() -> None:
    source = Growing()
    train = stoker.from_dataset(source, seed=0).shuffle().apply(Halves()).batch(2).workers(0)
    assert len(train) == len(list(train)) == 3
    source.length = 20
    assert len(list(train)) == 5
    assert ".Halves: filter(is_kept)" in str(train)
