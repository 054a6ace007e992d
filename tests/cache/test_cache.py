"""`.cache()` in pipelines: it changes nothing of what comes out, and never serves what is stale."""

from __future__ import annotations

import collections
import functools
import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stores import counted

import stoker
from command_line import python
from patience import wait_until
from scripts import Script, Watch, run, script
from stoker.basics import fingerprint
from stoker.sources.remote import storage
from strategies import Keep, few, frozen, jitter, one_in, small_pools_allowed, stream, through_json

LIMIT = "4MiB"
FITS = "fits in the page cache"
WORKERS = [(0, "thread"), (1, "thread"), (3, "thread"), (2, "process")]


@stoker.thread_safe  # one for all threads: it counts
class Rows:
    """Rows of various sizes, made anew each time; fails on some."""

    def __init__(self, length: int, bytes_each: int = 1000, bad: tuple[int, ...] = ()) -> None:
        self.length, self.bytes_each, self.bad = length, bytes_each, bad
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        if index in self.bad:
            raise OSError(f"{index} cannot be read")
        floats = (1 + index % 3) * self.bytes_each // 8
        return {"id": index, "x": np.full(floats, index, np.float64), "name": f"example {index}"}


def cropped(x: Any) -> Any:
    return x[:5] / 2


@stoker.thread_safe
def doubled(x: Any) -> Any:
    return x * 2


@stoker.thread_safe
def tripled(x: Any) -> Any:
    return x * 3


@stoker.thread_safe
def not_sevens(number: int) -> int:
    if number % 7 == 5:
        raise ValueError(f"{number} is not wanted")
    return number


@stoker.thread_safe
def hurt(number: int) -> int:
    if number == 4:
        raise ValueError("four hurts")
    return number


def filled(folder: Path, names: list[str], size: int = 2000) -> Path:
    """Make files of one size whose content tells their path."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"{folder.name}/{name}".encode().ljust(size, b"."))
    return folder


def pets(folder: Path, count: int = 6) -> Path:
    return filled(folder, [f"{kind}/{i}.jpg" for kind in ("cat", "dog") for i in range(count)])


def items(pipeline: stoker.Pipeline) -> int:
    return counted(pipeline).items


def quiet(pipeline: stoker.Pipeline) -> list[Any]:
    """Run an epoch of raw bytes of a small folder, which is warned of; return what came."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{FITS}", category=stoker.CacheWarning)
        return stream(pipeline)


# -- the stream


@dataclass(frozen=True)
class Chain:
    """A pipeline to be built with a cache or without."""

    examples: int
    batch: int
    limit: int | str = LIMIT
    shuffle: bool = True
    place: str = "raw"
    bytes_each: int = 1000
    bad: tuple[int, ...] = ()
    failing_map: str = ""
    echo: Any = None
    random: bool = False
    seed: int = 0

    def built(self, cache: bool, workers: int = 0, kind: str = "thread") -> stoker.Pipeline:
        fails = bool(self.bad or self.failing_map)
        pipeline = stoker.from_dataset(
            Rows(self.examples, self.bytes_each, self.bad),
            seed=self.seed,
            max_errors="100%" if fails else 0,
        )
        if self.shuffle:
            pipeline = pipeline.shuffle()
        if self.failing_map == "before":
            pipeline = pipeline.map(not_sevens, on="id")
        if self.place in ("filter", "both"):
            pipeline = pipeline.filter(Keep(3, 1), on="id")
        if self.place in ("map", "both"):
            pipeline = pipeline.map(cropped, on="x")
        if cache:
            pipeline = pipeline.cache(self.limit)
        if self.failing_map == "behind":
            pipeline = pipeline.map(not_sevens, on="id", max_errors="100%")
        pipeline = pipeline.filter(Keep(5, 2), on="id") if self.random else pipeline
        pipeline = pipeline.map(cropped, on="x")
        if self.echo is not None:
            pipeline = pipeline.echo(self.echo)
        if self.random:
            pipeline = pipeline.random_map(jitter, on="x")
        return pipeline.batch(self.batch, collate=list).workers(workers, kind=kind)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    examples = draw(st.integers(0, 60))
    return Chain(
        examples=examples,
        batch=draw(st.integers(1, 8)),
        limit=draw(st.integers(1 << 20, 5 << 20)),
        shuffle=draw(st.booleans()),
        place=draw(st.sampled_from(["raw", "map", "filter", "both"])),
        bytes_each=draw(st.sampled_from([16, 3000, 30_000])),
        bad=tuple(draw(st.sets(st.integers(0, max(0, examples - 1)), max_size=4))),
        failing_map=draw(st.sampled_from(["", "before", "behind"])),
        echo=draw(st.sampled_from([None, Fraction(2), Fraction(5, 2)])),
        random=draw(st.booleans()),
        seed=draw(st.integers(0, 2**40)),
    )


def same_with_a_cache(chain: Chain, workers: int, kind: str) -> list[stoker.types.CacheStats]:
    """Compare three epochs with those without a cache; return what the cache did in each."""
    plain, cached = chain.built(False), chain.built(True, workers, kind)
    found = []
    for _ in range(3):
        assert stream(cached) == stream(plain)
        assert cached.state_dict() == plain.state_dict()
        ours, theirs = cached.stats(), plain.stats()
        assert ours.skipped_examples == theirs.skipped_examples
        assert ours.filtered_examples == theirs.filtered_examples
        assert sorted(map(str, ours.skips)) == sorted(map(str, theirs.skips))
        found.append(counted(cached))
    stored = 0
    for stats in found:  # nothing leaves, and what is there is found
        assert stats.hits == stored
        assert stats.misses == chain.examples - stored
        assert stats.items == stored + stats.admitted
        assert stats.used_bytes <= stats.limit_bytes
        assert stats.damaged == 0
        stored = stats.items
    return found


@given(chains(), st.integers(0, 3))
@example(Chain(60, 4, 1 << 20, bytes_each=30_000), 2)
@example(Chain(60, 4, 1 << 20, place="both", bytes_each=30_000, failing_map="before"), 1)
@example(Chain(60, 4, 2 << 20, place="both", bytes_each=9_000, bad=(3,)), 1)
@example(Chain(40, 4, bad=(3,), failing_map="behind", echo=Fraction(2), random=True), 2)
def test_the_stream_is_the_one_without_a_cache(chain: Chain, workers: int) -> None:
    same_with_a_cache(chain, workers, "thread")


@pytest.mark.full
@few(4)
@given(chains(), st.integers(1, 2))
@example(Chain(60, 4, 1 << 20, bytes_each=30_000, bad=(3, 40), random=True), 2)
def test_the_stream_is_the_same_from_worker_processes(chain: Chain, workers: int) -> None:
    same_with_a_cache(chain, workers, "process")


@pytest.mark.parametrize(("workers", "kind"), WORKERS)
def test_what_fits_is_read_once(workers: int, kind: str) -> None:
    found = same_with_a_cache(Chain(50, 4, failing_map="behind", random=True), workers, kind)
    assert [stats.hits for stats in found] == [0, 50, 50]
    assert [stats.admitted for stats in found] == [50, 0, 0]
    assert found[1].saved_bytes == found[0].admitted_bytes


@pytest.mark.parametrize(("workers", "kind"), WORKERS)
def test_what_does_not_fit_is_missed_by_as_much(workers: int, kind: str) -> None:
    found = same_with_a_cache(Chain(60, 4, 1 << 20, bytes_each=30_000), workers, kind)
    assert 5 <= found[0].items < 40
    assert found[0].refused == 60 - found[0].items
    assert found[-1].full


def test_an_epoch_that_is_left_early_keeps_what_it_has_read() -> None:
    pipeline = stoker.from_dataset(Rows(40)).cache(LIMIT).batch(4, collate=list).workers(2)
    with iter(pipeline) as batches:
        next(batches)
        next(batches)
    stored = items(pipeline)
    assert stored >= 8
    pipeline.set_epoch(0)
    assert len(stream(pipeline)) == 10
    assert counted(pipeline).hits == stored
    assert items(pipeline) == 40


def test_a_part_of_the_epoch_is_kept_on_each_rank() -> None:
    for rank in range(2):
        data = Rows(40)
        pipeline = stoker.from_dataset(data, seed=0).shard(rank=rank, world_size=2).shuffle()
        pipeline = pipeline.cache(LIMIT).workers(0)
        first = sorted(row["id"] for row in pipeline)
        assert len(data.asked) == len(first) + 8  # of which one is tried, whether it repeats
        again = sorted(row["id"] for row in pipeline)
        assert first == again
        assert sorted(set(data.asked)) == first  # in one epoch of two
        assert len(data.asked) == len(first) + 8


# -- state


@few(8)
@given(chains(), st.integers(0, 5), st.booleans())
def test_states_are_those_without_a_cache(chain: Chain, taken: int, to_plain: bool) -> None:
    both = [chain.built(cache) for cache in (True, False)]
    states = []
    tails = []
    for pipeline in both:
        stream(pipeline)
        with small_pools_allowed(), iter(pipeline) as batches:
            for _ in zip(range(taken), batches, strict=False):
                pass
            states.append(pipeline.state_dict())
            tails.append([frozen(batch) for batch in batches])
    assert states[0] == states[1]
    assert tails[0] == tails[1]
    restored = chain.built(not to_plain)
    restored.load_state_dict(through_json(states[0 if to_plain else 1]))
    if tails[0]:  # or else the next epoch comes
        assert stream(restored) == tails[0]


# -- what is refused


def examples() -> stoker.Pipeline:
    return stoker.from_dataset(Rows(8))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a device": (lambda: examples().batch(4).to_torch().cache(), r"\.cache\(\).*before"),
    "streams": (lambda: stoker.from_iterable(range(8)).cache(), "a stream is read once.*echo"),
    "loaders": (lambda: stoker.from_loader([1, 2]).cache(), "cache its dataset instead.*cached"),
    "kept datasets": (lambda: examples().cache(keep=True), "needs version="),
    "kept arrays": (lambda: stoker.from_arrays(np.zeros(4)).cache(keep=True), "needs version="),
    "nothing": (lambda: examples().cache(0), "at least 1.0 MiB"),
    "little": (lambda: examples().cache("10KB"), "at least 1.0 MiB"),
    "one of what": (lambda: examples().cache(1), "a share of memory such as '50%'"),
    "more than all": (lambda: examples().cache("150%"), "'150%' is not a size"),
    "none of it": (lambda: examples().cache("0%"), "'0%' is not a size"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cached_is_refused_where_it_is_written(what: str) -> None:
    make, says = REFUSED[what]
    with pytest.raises(ValueError, match=says):
        make()


def test_functions_of_one_s_own_are_kept_with_a_version_only(tmp_path: Path) -> None:
    folder = stoker.from_folder(pets(tmp_path / "train"))
    kept: dict[str, Any] = {"path": tmp_path / "store", "keep": True}
    with pytest.raises(ValueError, match="needs version="):
        folder.map(len, on="image").cache(LIMIT, **kept)
    with pytest.raises(ValueError, match="needs version="):
        folder.filter(bool).cache(LIMIT, **kept)
    folder.cache(LIMIT, **kept)
    folder.map(stoker.images.decode, on="image").cache(LIMIT, **kept)
    folder.map(len, on="image").cache(LIMIT, version="1", **kept)
    folder.map(len, on="image").cache(LIMIT, path=tmp_path / "store", keep=False)


@pytest.mark.parametrize("limit", [True, [1], b"4MiB", 0.5, 1.0])
def test_a_limit_of_another_type_is_refused(limit: Any) -> None:
    with pytest.raises(TypeError, match=r"\('64GiB'\), a share of memory as text \('50%'\)"):
        examples().cache(limit)


@pytest.mark.parametrize("version", [3, "", b"1"])
def test_a_version_is_a_text(version: Any) -> None:
    with pytest.raises(TypeError, match="version= is a text"):
        examples().cache(LIMIT, version=version)


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    pipeline = examples().cache(LIMIT, path=tmp_path / "mine", keep=False)
    with pytest.raises(
        stoker.CacheError, match=r"holds (other files|files that are not a cache's)"
    ):
        iter(pipeline)
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]


class Augmented(Rows):
    """Rows that are turned around by chance, by a generator that all share or one of their own."""

    def __init__(self, own: bool = False) -> None:
        super().__init__(16)
        self.draw = np.random.default_rng(0).random if own else np.random.rand

    def __getitem__(self, index: int) -> Any:
        x = np.arange(4) + index
        return x[::-1].copy() if self.draw() < 0.5 else x


def shaken(x: Any) -> Any:
    return x + np.random.rand()


def sometimes(x: Any) -> bool:
    return bool(np.random.rand() < 0.5)


class Numbers(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return float(np.random.rand())


RANDOM: dict[str, Callable[[], stoker.Pipeline]] = {
    "numbers": lambda: stoker.from_dataset(Numbers(range(8)), seed=0),
    "datasets": lambda: stoker.from_dataset(Augmented(), seed=0),
    "with a generator of their own": lambda: stoker.from_dataset(Augmented(own=True), seed=0),
    "maps": lambda: examples().map(shaken, on="x"),
    "maps of rows": lambda: stoker.from_arrays(np.zeros((8, 3))).map(shaken),
    "filters": lambda: examples().filter(sometimes, on="x"),
}


# A coin may fall alike each time it is tried: then the draws themselves are named.
ANOTHER_EACH_TIME = (
    r"(is different each time it is|draws random numbers from numpy\.random).*random_map"
)


@pytest.mark.filterwarnings("ignore:.* drew from numpy.random in each of its first calls")
@pytest.mark.parametrize(
    ("what", "workers", "kind"),
    one_in(
        2, [*((what, 0, "thread") for what in RANDOM), *(("datasets", *how) for how in WORKERS[1:])]
    ),
)
def test_what_is_another_one_each_time_is_refused(what: str, workers: int, kind: str) -> None:
    pipeline = RANDOM[what]().cache(LIMIT).workers(workers, kind=kind)
    for _ in range(2):  # not only at the first try
        with pytest.raises(stoker.StageError, match=ANOTHER_EACH_TIME):
            list(pipeline)
        assert items(pipeline) == 0
    assert len(list(RANDOM[what]())) in range(17)  # without a cache nobody minds


def test_what_others_have_in_a_store_vouches_for_nobody(tmp_path: Path) -> None:
    list(examples().cache(LIMIT, path=tmp_path / "store", version="1").workers(0))
    random = stoker.from_dataset(Augmented(), seed=0)
    with pytest.raises(stoker.StageError, match=ANOTHER_EACH_TIME):
        list(random.cache(LIMIT, path=tmp_path / "store", version="1").workers(0))


@stoker.thread_safe
def in_place(x: Any) -> Any:
    x += 1
    return x


def test_what_a_map_does_in_place_is_no_other_example(tmp_path: Path) -> None:
    rows = stoker.from_arrays(np.zeros((8, 3))).map(in_place)
    assert stream(rows.cache(LIMIT)) == stream(rows)
    dataset = stoker.from_dataset(Rows(8)).map(in_place, on="x")
    assert stream(dataset.cache(LIMIT)) == stream(dataset)
    np.save(tmp_path / "tokens.npy", np.arange(100))
    windows = stoker.from_tokens(tmp_path / "tokens.npy", 10).map(in_place, on="inputs")
    assert stream(windows.cache(LIMIT)) == stream(windows)
    bytes_of_files = stoker.from_folder(pets(tmp_path / "train")).map(bytearray, on="image")
    assert quiet(bytes_of_files.map(bytes, on="image").cache(LIMIT))


@pytest.mark.filterwarnings("ignore:.* drew from numpy.random in each of its first calls")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_check_for_it_changes_no_draws_and_no_stream(workers: int) -> None:
    """In worker processes each use has draws of its own; with one thread they go on in a row."""
    kind = "process" if workers else "thread"

    def drawing() -> stoker.Pipeline:
        return stoker.from_dataset(Rows(12), seed=0).map(drawn_for_nothing, on="x")

    found = []
    for cache in (False, True):
        np.random.seed(1)
        CALLS.clear()
        pipeline = drawing().cache(LIMIT) if cache else drawing()
        pipeline = pipeline.map(shaken, on="x").workers(workers, kind=kind)
        found.append(stream(pipeline))
    assert found[0] == found[1]


CALLS: collections.Counter[bytes] = collections.Counter()


def drawn_for_nothing(x: Any) -> Any:
    """Draw in every other call for an example: what draws in each is refused."""
    name = np.asarray(x).tobytes()
    CALLS[name] += 1
    if CALLS[name] % 2 == 0:
        np.random.rand(3)
    return x


# -- never what is stale, nor another's


def touched(file: Path, content: bytes) -> None:
    """Write a file as a later change: its time of change moves, whatever the clock's grain."""
    before = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(before + 1_000_000, before + 1_000_000))


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (2, "thread"), (1, "process")])
def test_a_file_that_changed_between_epochs_is_read_anew(
    tmp_path: Path, workers: int, kind: str
) -> None:
    folder = pets(tmp_path / "train")
    pipeline = stoker.from_folder(folder).cache(LIMIT).workers(workers, kind=kind)
    quiet(pipeline)
    same_size, longer = folder / "cat" / "2.jpg", folder / "dog" / "0.jpg"
    touched(same_size, b"new".ljust(2000, b"!"))
    touched(longer, b"longer" * 1000)
    plain = stoker.from_folder(folder).workers(0)
    for hits in (10, 12):
        assert quiet(pipeline) == stream(plain)
        assert counted(pipeline).hits == hits


def rewritten(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def replaced(file: Path, content: bytes) -> None:
    """As ``rsync`` and ``tar`` do it: written beside it, and renamed."""
    beside = file.with_name(".beside")
    beside.write_bytes(content)
    times = file.stat()
    os.utime(beside, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.rename(beside, file)


def linked(file: Path, content: bytes) -> None:
    """As where a link leads to another version of all the data."""
    other = file.parent.parent.parent / f"version of {file.name}"
    other.write_bytes(content)
    times = file.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    file.unlink()
    file.symlink_to(other)


@pytest.mark.parametrize("source", ["folder", "files", "file://"])
@pytest.mark.parametrize("write", [rewritten, replaced, linked])
def test_a_file_that_looks_as_before_is_read_anew(
    tmp_path: Path, write: Callable[[Path, bytes], None], source: str
) -> None:
    """Its size is the same, and its time of modification is set back."""
    folder = pets(tmp_path / "train")
    pattern = str(folder / "*" / "*.jpg")
    if source == "file://":
        pattern = f"file://{pattern}"

    def cached() -> stoker.Pipeline:
        plain = stoker.from_folder(folder) if source == "folder" else stoker.from_files(pattern)
        return plain.cache(LIMIT, path=tmp_path / "store").workers(0)

    quiet(cached())
    file = folder / "cat" / "2.jpg"
    before = file.stat()
    later = before.st_ctime_ns
    while later == before.st_ctime_ns:  # the kernel's clock goes by ticks
        write(file, b"new".ljust(2000, b"!"))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        later = file.stat().st_ctime_ns
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (2000, before.st_mtime_ns)
    pipeline = cached()
    found = [bytes(example[source != "folder"]) for example in pipeline]
    assert found[2] == b"new".ljust(2000, b"!")
    assert counted(pipeline).hits == 11


def test_what_may_number_files_anew_is_told_by_the_system() -> None:
    lines = [
        "22 28 0:21 / /proc rw,nosuid shared:5 - proc proc rw",
        "23 28 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw",
        "24 23 0:50 / /mnt/a\\040b rw,relatime - fuse.gcsfuse bucket rw,user_id=0",
        "25 23 0:51 / /mnt/s rw - fuse.sshfs host: rw",
        "26 23 0:52 / /mnt/n rw - nfs4 host:/ rw",
        "27 23 8:17 / /mnt/u rw - vfat /dev/sdb1 rw",
        "28 23 0:53 / /mnt/c rw - cifs //host/share rw",
    ]
    mounts = "\n".join(lines)
    for device, expected in (
        ((8, 2), False),
        ((0, 50), True),
        ((0, 51), True),
        ((0, 52), False),
        ((8, 17), True),
        ((0, 53), True),
    ):
        assert fingerprint.can_renumber(os.makedev(*device), mounts) is expected
    assert fingerprint.can_renumber(os.makedev(0, 99), mounts) is False  # a part of a file system
    assert fingerprint.can_renumber(os.makedev(8, 2), "") is False


def told(**info: Any) -> int:
    (_, (version,)) = storage._read_infos([{"size": 1, **info}])
    return version


def test_versions_of_servers_are_what_no_writer_can_set_back() -> None:
    assert told() == told(mtime=5) == told(mtime=5, ino=3) == 0
    known = [
        told(ETag="a"),
        told(ETag="b"),
        told(md5Hash="c"),
        told(LastModified=1),
        told(created=2),
        told(created=2, mtime=5),
        told(created=3, mtime=5),
        told(created=3, mtime=5, ino=3),
    ]
    assert len({0, *known}) == len(known) + 1
    assert told(ETag="a", LastModified=1) == told(ETag="a", LastModified=2)  # the same content


def each_has_its_own(
    store: Path, count: int, makes: list[Callable[[], stoker.Pipeline]], **how: Any
) -> None:
    """Fill one store by several pipelines, and find in it what each of them put there."""
    for hits in (0, count):
        for make in makes:
            pipeline = make().cache(LIMIT, path=store, **how).workers(0)
            assert quiet(pipeline) == stream(make())
            assert counted(pipeline).hits == hits


def test_a_class_that_is_added_shifts_no_cached_label(tmp_path: Path) -> None:
    folder = pets(tmp_path / "train")
    each_has_its_own(tmp_path / "store", 12, [lambda: stoker.from_folder(folder)])
    filled(folder, [f"ant/{i}.jpg" for i in range(3)])  # all labels are others
    each_has_its_own(tmp_path / "store", 15, [lambda: stoker.from_folder(folder)])


def test_two_folders_in_one_store_are_not_confused(tmp_path: Path) -> None:
    one, two = (pets(tmp_path / name) for name in ("one", "two"))
    for file in (*one.rglob("*.jpg"), *two.rglob("*.jpg")):  # alike but for their content
        os.utime(file, ns=(10**18, 10**18))
    makes = [lambda: stoker.from_folder(one), lambda: stoker.from_folder(two)]
    each_has_its_own(tmp_path / "store", 12, makes)


def test_two_folders_of_one_relative_name_are_not_confused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    for job in ("one", "two"):
        (tmp_path / job).mkdir()
        monkeypatch.chdir(tmp_path / job)
        pets(tmp_path / job / "train")
        for file in Path("train").rglob("*.jpg"):
            file.write_bytes(job.encode().ljust(2000))
            os.utime(file, ns=(10**18, 10**18))
        chain = stoker.from_folder("train").map(doubled, on="label")
        cached = chain.cache(LIMIT, path=store, version="1").workers(0)
        assert stream(cached) == stream(chain)


def test_two_spellings_of_a_path_are_not_confused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example has its path as it was given; a link may lead elsewhere than its spelling."""
    pets(tmp_path / "train")
    (tmp_path / "there").mkdir()
    (tmp_path / "a.txt").write_text("here")
    (tmp_path / "there" / "a.txt").write_text("there")
    monkeypatch.chdir(tmp_path)
    globs = ["train/*/*.jpg", f"{tmp_path}/train/*/*.jpg", "./train/*/*.jpg"]
    makes: Any = [functools.partial(stoker.from_files, pattern) for pattern in globs]
    each_has_its_own(tmp_path / "store", 12, makes)
    (tmp_path / "there" / "deep").mkdir()
    (tmp_path / "deep").symlink_to(tmp_path / "there" / "deep")
    up = stoker.from_files("deep/../a.txt").cache(LIMIT, path=tmp_path / "up")
    for text in ("there", "other"):
        (tmp_path / "there" / "a.txt").write_text(text)
        assert [each.data.decode() for each in up] == [text]


@pytest.mark.parametrize("second", ["here", "elsewhere"])
def test_a_store_is_kept_if_one_of_its_users_wants_it(tmp_path: Path, second: str) -> None:
    store = str(tmp_path / "store")

    def made(**how: Any) -> stoker.Pipeline[Any]:
        return stoker.from_dataset(range(8)).cache("1MiB", path=store, version="1", **how)

    users = [made(keep=False)]
    assert list(users[0]) == [*range(8)]
    if second == "here":
        users.append(made())
        assert list(users[1]) == [*range(8)]
    else:
        elsewhere = f"""
            made = stoker.from_dataset(range(8)).cache("1MiB", path={store!r}, version="1")
            assert list(made) == [*range(8)]
        """
        run(tmp_path, elsewhere)
    users.clear()
    gc.collect()
    again = made()
    assert list(again) == [*range(8)]
    assert counted(again).hits == 8


def test_two_versions_in_one_store_are_not_confused(tmp_path: Path) -> None:
    held: list[stoker.Pipeline] = []
    for version in ("1", "2", "1"):
        rows = np.full((10, 3), int(version))
        pipeline = stoker.from_arrays(rows).cache(LIMIT, path=tmp_path / "store", version=version)
        assert all((row == int(version)).all() for row in pipeline)
        held.append(pipeline)
    assert [counted(pipeline).hits for pipeline in held] == [0, 0, 10]


def test_two_chains_in_one_store_are_not_confused(tmp_path: Path) -> None:
    source = stoker.from_arrays(np.arange(10), np.arange(10) + 100)
    makes: list[Callable[[], stoker.Pipeline]] = [
        lambda: source,
        lambda: source.map(doubled, on=0),
        lambda: source.map(doubled, on=1),
        lambda: source.map(tripled, on=0),
        lambda: source.map(doubled, on=0).map(tripled, on=0),
        lambda: source.filter(Keep(2, 0), on=0).map(doubled, on=0),
    ]
    each_has_its_own(tmp_path / "store", 10, makes, version="1")


def test_files_and_folders_of_one_path_are_not_confused(tmp_path: Path) -> None:
    """Whatever the files' names are."""
    folder = pets(tmp_path / "train")
    with open(os.path.join(os.fsencode(folder), b"cat", b"caf\xe9.jpg"), "wb") as file:
        file.write(b"coffee")
    makes: list[Callable[[], stoker.Pipeline]] = [
        lambda: stoker.from_folder(folder),
        lambda: stoker.from_files(str(folder / "*" / "*.jpg")),
    ]
    each_has_its_own(tmp_path / "store", 13, makes)


# -- shared, kept, gone


def test_processes_on_one_folder_share_a_store(tmp_path: Path) -> None:
    folder = pets(tmp_path / "train")
    body = f"""
        warnings.simplefilter("ignore")
        pipeline = stoker.from_folder({str(folder)!r}).shuffle().cache("4MiB").batch(3)
        count = sum(len(batch.label) for batch in pipeline)
        stats = pipeline.stats().cache
        say(json.dumps([count, stats.hits, stats.misses, stats.folder]))
    """
    pipeline = stoker.from_folder(folder).cache(LIMIT).workers(0)
    quiet(pipeline)
    ((count, hits, misses, where),) = run(tmp_path, body)
    assert (count, hits, misses) == (12, 12, 0)
    assert where == counted(pipeline).folder
    assert os.path.isdir(where)  # who left was not the last
    quiet(pipeline)
    assert counted(pipeline).hits == 12
    del pipeline
    assert not os.path.exists(where)
    ((count, hits, misses, _),) = run(tmp_path, body)
    assert (count, hits, misses) == (12, 0, 12)


ENDS = {"end": "", "exception": 'raise RuntimeError("over")', "ctrl-c": "stay()", "kill": "stay()"}

STORES = """
    multiprocessing.set_start_method("fork")  # by forkserver, the default of 3.14, workers run this
    kept = os.path.join({folder!r}, "kept")
    chain = stoker.from_dataset(Examples(20), seed=0)
    made = [
        chain.cache("2MiB").workers({workers}, kind={kind!r}),
        chain.cache("2MiB", path=kept + "-not", keep=False).workers({workers}, kind={kind!r}),
        chain.cache("2MiB", path=kept, version="1").workers({workers}, kind={kind!r}),
    ]
    for pipeline in made:
        assert len(list(pipeline)) == 20
        assert pipeline.stats().cache.items == 20


    def stay():
        long = stoker.from_dataset(Examples(100_000, 0.001), seed=0)
        long = long.cache("4MiB").workers({workers}, kind={kind!r})
        for number, _ in enumerate(long):
            if number == 20:
                say("staying")


    say(json.dumps([pipeline.stats().cache.folder for pipeline in made]))
    {end}
"""


def ended(running: Script, how: str) -> list[str]:
    """Have a program end in some way; return the folders of its stores, all there before."""
    folders: list[str] = json.loads(running.line())
    if how in ("ctrl-c", "kill"):
        assert running.line() == "staying"
        assert all(map(os.path.isdir, folders))
        with Watch([running.pid]) as watch:
            if how == "ctrl-c":
                os.kill(running.pid, signal.SIGINT)
            else:
                os.killpg(running.pid, signal.SIGKILL)
            assert watch.gone()
    _, _, errors = running.finish()
    expected = {"end": "", "exception": "RuntimeError: over", "ctrl-c": "KeyboardInterrupt"}
    assert expected.get(how, "") in errors
    if how == "end":
        assert errors == ""
    return folders


@pytest.mark.parametrize(
    ("how", "workers", "kind"),
    [
        ("end", 2, "thread"),
        ("end", 1, "process"),
        ("exception", 0, "thread"),
        pytest.param("ctrl-c", 0, "thread", marks=pytest.mark.interrupts),
        pytest.param("ctrl-c", 2, "thread", marks=pytest.mark.interrupts),
        pytest.param("ctrl-c", 2, "process", marks=pytest.mark.interrupts),
    ],
)
def test_what_is_temporary_goes_with_its_process(
    tmp_path: Path, how: str, workers: int, kind: str
) -> None:
    body = STORES.format(folder=str(tmp_path), workers=workers, kind=kind, end=ENDS[how])
    with script(tmp_path, body) as running:
        *temporary, stays = ended(running, how)
    assert not any(map(os.path.exists, temporary))
    assert os.path.isdir(stays)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    again = stoker.from_dataset(Rows(20), seed=0)
    assert items_of(again, stays) == 20


def items_of(chain: stoker.Pipeline, store: str) -> int:
    """Return what is in a kept store."""
    pipeline = chain.cache("2MiB", path=store, version="other").workers(0)
    with iter(pipeline):
        return items(pipeline)


def listed() -> None:
    command = "from stoker.cli import main; main()"
    done = python("-W", "error", "-c", command, "cache", "list")
    assert (done.returncode, done.stderr) == (0, "")


def iterated() -> None:
    list(stoker.from_dataset(Rows(3)).cache("2MiB").workers(0))


@pytest.mark.parametrize(
    ("next_one", "workers", "kind"),
    one_in(3, [(iterated, 0, "thread"), (listed, 2, "thread"), (iterated, 2, "process")]),
)
def test_what_was_left_by_a_kill_is_removed_by_the_next_process(
    tmp_path: Path, next_one: Callable[[], None], workers: int, kind: str
) -> None:
    body = STORES.format(folder=str(tmp_path), workers=workers, kind=kind, end=ENDS["kill"])
    with script(tmp_path, body) as running:
        folders = ended(running, "kill")
    assert os.path.isdir(folders[1])
    next_one()
    assert [os.path.exists(folder) for folder in folders[1:]] == [False, True]
    wait_until(lambda: not os.path.exists(folders[0]))  # in memory: swept by anybody, now or then
    assert items_of(stoker.from_dataset(Rows(20), seed=0), folders[2]) == 20


def test_what_others_still_use_outlives_a_kill(tmp_path: Path) -> None:
    body = STORES.format(folder=str(tmp_path), workers=2, kind="thread", end=ENDS["kill"])
    with script(tmp_path, body) as running:
        store = str(tmp_path / "kept-not")
        assert store in running.line()
        assert running.line() == "staying"
        pipeline = stoker.from_dataset(Rows(20)).cache("2MiB", path=store, keep=False).workers(0)
        with iter(pipeline) as rows:
            next(rows)
            with Watch([running.pid]) as watch:
                os.killpg(running.pid, signal.SIGKILL)
                assert watch.gone()
            listed()
            assert os.path.isdir(store)
            assert len(list(rows)) == 19
        assert items(pipeline) == 40
    del pipeline, rows
    assert not os.path.exists(store)


def test_a_path_is_warm_in_the_next_process(tmp_path: Path) -> None:
    folder, store = pets(tmp_path / "train"), tmp_path / "deep" / "store"
    body = f"""
        pipeline = stoker.from_folder({str(folder)!r}).cache("4MiB", path={str(store)!r}).workers(1)
        for _ in range(2):
            list(pipeline)
            stats = pipeline.stats().cache
            say(json.dumps([stats.hits, stats.misses, stats.items]))
    """
    assert run(tmp_path, body) == [[0, 12, 12], [12, 0, 12]]
    assert run(tmp_path, body) == [[12, 0, 12], [12, 0, 12]]


PRESSED = """
    faulthandler.dump_traceback_later(180, exit=True)
    import subprocess

    pipeline = stoker.from_dataset(Examples(20), seed=0).cache("2MiB").workers(0)
    list(pipeline)
    inside = 0


    def pressed(number, frame):
        global inside
        while frame is not None:
            if os.path.join("stoker", "cache") in frame.f_code.co_filename:
                inside += 1
                raise KeyboardInterrupt
            frame = frame.f_back


    signal.signal(signal.SIGINT, pressed)
    press = "import os, sys, time\\nwhile True: os.kill(int(sys.argv[1]), 2); time.sleep(0.0007)"
    pressing = subprocess.Popen([sys.executable, "-I", "-c", press, str(os.getpid())])
    for _ in range(600):
        if inside >= 30:
            break
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pressing.kill()
    pressing.wait()
    count = len(list(pipeline))
    say(json.dumps([count, pipeline.stats().cache.hits]))
"""


@pytest.mark.interrupts
def test_ctrl_c_while_the_process_forks_leaves_the_store_in_order(tmp_path: Path) -> None:
    # What is raised there, Python throws away: but what it interrupted must not stay half done.
    assert json.loads(finished(tmp_path, PRESSED)) == [20, 20]


READ = """
    faulthandler.dump_traceback_later(180, exit=True)
    import random

    pipeline = stoker.from_dataset(Examples(20), seed=0).cache("2MiB").workers(0)
    list(pipeline)
    stopped = 0


    def pressed(number, frame):
        while frame is not None:
            if os.path.join("stoker", "cache") in frame.f_code.co_filename:
                raise KeyboardInterrupt
            frame = frame.f_back


    signal.signal(signal.SIGINT, pressed)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    while stopped < 400:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-3), 7e-4)
            while True:
                list(pipeline)
        except KeyboardInterrupt:
            stopped += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    count = len(list(pipeline))
    cache = pipeline.stats().cache
    say(json.dumps([count, cache.hits, cache.damaged]))
"""


@pytest.mark.interrupts
def test_ctrl_c_while_a_cache_is_read_leaves_the_store_in_order(tmp_path: Path) -> None:
    assert json.loads(finished(tmp_path, READ)) == [20, 20, 0]


def finished(folder: Path, body: str) -> str:
    """Run a program that may complain to its end; return what it said."""
    with script(folder, body) as running:
        code, out, errors = running.finish()
    assert code == 0, errors[-3000:]
    return out


# -- what is said


def test_raw_bytes_that_fit_in_the_page_cache_are_told_once(tmp_path: Path) -> None:
    pipeline = stoker.from_folder(pets(tmp_path / "train")).shuffle().cache(LIMIT)
    with pytest.warns(stoker.CacheWarning, match=FITS) as said:
        list(pipeline)
    assert len(said) == 1
    assert said[0].filename == __file__
    list(pipeline)


def test_hosts_that_draw_their_parts_anew_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    source = stoker.from_dataset(Rows(8), seed=0)
    with pytest.warns(stoker.CacheWarning, match=r"2 hosts draw .* put \.shard\(\) before"):
        list(source.shuffle().shard(rank=0, world_size=4).cache(LIMIT))
    list(source.shard(rank=0, world_size=4).shuffle().cache(LIMIT))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # one host sees all parts
    list(source.shuffle().shard(rank=0, world_size=4).cache(LIMIT))


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_limit_that_nobody_has_is_lowered_and_told(tmp_path: Path, on_disk: bool) -> None:
    path = tmp_path / "store" if on_disk else None
    pipeline = stoker.from_dataset(Rows(8)).cache("900TB", path=path, keep=False)
    says = r"the cache (gets|can only be) .*(limit=|path=)"
    with pytest.warns(stoker.CacheWarning, match=says) as said:
        list(pipeline)
    assert {warning.filename for warning in said} == {__file__}
    list(pipeline)
    assert counted(pipeline).hits == 8
    assert 1 << 20 <= counted(pipeline).limit_bytes < 900e12


class CostlyRows(Rows):
    """Rows that a cache saves time of, on a busy machine too."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_a_share_and_auto_are_resolved() -> None:
    stats = []
    for limit in ("0.1%", "auto", "1%"):
        pipeline = stoker.from_dataset(CostlyRows(8)).cache(limit)
        with warnings.catch_warnings():  # where the container's memory is small
            warnings.filterwarnings("ignore", message="the cache can only be")
            list(pipeline)
            list(pipeline)
        stats.append(counted(pipeline))
        assert stats[-1].hits == 8
    assert stats[0].limit_bytes < stats[2].limit_bytes < stats[1].limit_bytes


@pytest.mark.parametrize("open_still", [False, True])
def test_a_store_that_was_made_with_another_limit_says_so(tmp_path: Path, open_still: bool) -> None:
    folder, store = pets(tmp_path / "train"), tmp_path / "store"
    first = stoker.from_folder(folder).cache("2MiB", path=store)
    list(first)
    list(stoker.from_folder(folder).cache("2MiB", path=store))
    if not open_still:
        del first
    with pytest.warns(
        stoker.CacheWarning, match=r"made with 2.0 MiB, and keeps that size. For 8.0 MiB"
    ):
        list(stoker.from_folder(folder).cache("8MiB", path=store))


def test_the_statistics_show_the_cache() -> None:
    pipeline = stoker.from_dataset(Rows(8)).cache(LIMIT)
    list(pipeline)
    list(pipeline)
    assert "8 hits and 0 misses (100% hits)" in str(pipeline.stats())
    assert counted(pipeline).hit_fraction == 1
    assert stoker.from_dataset(Rows(8)).stats().cache is None


# -- what fails


def failure(pipeline: stoker.Pipeline) -> stoker.StageError:
    """Run epochs until one fails."""
    with pytest.raises(stoker.StageError) as caught:
        collections.deque((quiet(pipeline) for _ in range(3)), maxlen=0)
    return caught.value


@pytest.mark.parametrize(("workers", "kind"), one_in(3, WORKERS))
@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_stage_that_fails_is_named_as_without_a_cache(
    tmp_path: Path, workers: int, kind: str, place: str
) -> None:
    lengths = stoker.from_folder(pets(tmp_path / "train")).map(len, on="image")
    expected = lengths.map(not_sevens, on="image")  # files of 2,000 bytes: 2000 % 7 == 5
    if place == "before":
        cached = expected.cache(LIMIT)
    else:
        cached = lengths.cache(LIMIT).map(not_sevens, on="image")
    cached = cached.workers(workers, kind=kind)
    error, plain = failure(cached), failure(expected)
    assert str(error) == str(plain)
    assert (error.stage, error.index, error.path) == (plain.stage, plain.index, plain.path)
    assert error.path == str(tmp_path / "train" / "cat" / "0.jpg")
    again = failure(cached)  # from the store, where it stands before the failing stage
    assert str(again) == str(plain)


def test_a_map_before_the_cache_fails_each_time_and_is_not_kept() -> None:
    pipeline = stoker.from_dataset(Rows(8), max_errors=1).map(hurt, on="id").cache(LIMIT).workers(0)
    for hits in (0, 7):
        assert len(list(pipeline)) == 7
        (skip,) = pipeline.stats().skips
        assert (skip.stage, skip.index) == ("map(hurt, on='id')", 4)
        assert counted(pipeline).hits == hits
    assert items(pipeline) == 7


@pytest.mark.parametrize("behind", ["source", "map"])
def test_a_file_that_was_removed_is_the_source_s_failure(tmp_path: Path, behind: str) -> None:
    folder = pets(tmp_path / "train")
    plain = stoker.from_folder(folder)
    if behind == "map":
        plain = plain.map(len, on="image")
    cached = plain.cache(LIMIT).workers(2)
    (folder / "cat" / "0.jpg").unlink()
    error, expected = failure(cached), failure(plain)
    assert str(error) == str(expected)
    assert error.stage == expected.stage == f"from_folder({str(folder)!r})"
    assert isinstance(error.__cause__, FileNotFoundError)


def test_a_file_that_is_removed_once_it_was_read_fails_nothing(tmp_path: Path) -> None:
    folder = pets(tmp_path / "train")

    def consumed(example: Any) -> int:
        os.unlink(example.path)
        return len(example.data)

    pipeline = stoker.from_files(str(folder / "*" / "*.jpg")).map(consumed).cache(LIMIT)
    assert list(pipeline.workers(0)) == [2000] * 12


def picture(data: bytes) -> Any:
    from PIL import Image

    return Image.new("RGB", (2, 2))


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (2, "thread"), (1, "process")])
def test_a_value_that_cannot_be_cached_says_what_to_do(
    tmp_path: Path, workers: int, kind: str
) -> None:
    chain = stoker.from_folder(pets(tmp_path / "train")).map(picture, on="image")
    error = failure(chain.cache(LIMIT).workers(workers, kind=kind))
    assert error.stage == "cache(4.0 MiB)"
    assert error.index == 0
    assert error.path == str(tmp_path / "train" / "cat" / "0.jpg")
    assert "cannot store or send a PIL.Image.Image (at image)" in str(error)
    assert "Convert the value to an array, or put .cache() before the stage" in str(error)


# -- where files come from


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    from experiments.server import serving

    with serving(pets(tmp_path / "served")) as running:
        yield running


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (2, "thread"), (2, "process")])
def test_from_a_server_each_file_is_read_once(server: Any, workers: int, kind: str) -> None:
    files = f"{server.url}/{{cat,dog}}/{{0..5}}.jpg"
    plain = stoker.from_files(files, seed=0).shuffle().batch(4).workers(0)
    cached = stoker.from_files(files, seed=0).shuffle().cache(LIMIT, version="1")
    cached = cached.batch(4).workers(workers, kind=kind)
    for hits in (0, 12, 12):
        expected = stream(plain)
        before = server.stats().requests
        assert quiet(cached) == expected
        assert server.stats().requests - before == 12 - hits
        assert (counted(cached).hits, counted(cached).misses) == (hits, 12 - hits)


@pytest.mark.full  # it waits a second for a thread that cannot end
def test_the_collector_may_free_a_cache_within_threading_enumerate() -> None:
    train = stoker.from_dataset(Rows(20)).cache("2MiB").workers(0)
    list(train)
    with threading._active_limbo_lock:  # type: ignore[attr-defined]
        del train
        gc.collect()


@pytest.mark.parametrize("limit", ["4MiB", "0.05%"])
def test_a_damaged_cache_is_made_anew_with_the_limit_of_now(tmp_path: Path, limit: Any) -> None:
    folder = tmp_path / "cache"
    items = [bytes([n]) * 1000 for n in range(50)]

    def run() -> int:
        train = stoker.from_dataset(items, seed=0).cache(limit, path=folder, version="1")
        assert sorted(train) == items
        cache = train.stats().cache
        assert cache is not None
        assert cache.items == 50
        assert cache.limit_bytes >= 1 << 20
        return cache.hits

    assert run() == 0
    gc.collect()
    assert run() == 50
    gc.collect()
    os.truncate(folder / "data.mdb", 8192)
    with pytest.warns(stoker.CacheWarning, match=r"is damaged .* and is rebuilt"):
        assert run() == 0
    gc.collect()
    assert run() == 50


@pytest.mark.parametrize("how", ["pipeline", "dataset"])
def test_without_lmdb_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    store = tmp_path / "store"
    pipeline = stoker.from_dataset(Rows(5)).cache("2MiB", path=store, version="1").workers(0)
    uses: dict[str, Callable[[], Any]] = {
        "pipeline": lambda: list(pipeline),
        "dataset": lambda: stoker.cached(Rows(5), "2MiB", path=store, version="1"),
    }
    with pytest.raises(ImportError, match=r"a cache needs the package lmdb .*pip install lmdb"):
        uses[how]()
    assert os.listdir(tmp_path) == []
