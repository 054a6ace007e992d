"""The store: what is in it is right or missing, whatever happens to its users and to its files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stores import (
    HERE,
    LIMIT,
    PRELUDE,
    USER,
    content,
    fill,
    found,
    item,
    joined,
    key,
    keys_in,
    opened,
    patiently,
    wrong,
)

import stoker
from patience import wait_until
from scripts import Script, Watch, run, script
from stoker.cache import inventory, location, store_dir
from stoker.cache.counters import (
    DATA_NS,
    ENDED,
    IN_USE,
    ITEMS,
    PAYLOAD_BYTES,
    ROWS,
    USED_BYTES,
    WRITING,
    Counters,
    read_head,
)
from stoker.cache.layout import StoredItem
from stoker.cache.store import DATA, Store, StoreLocked, changed_ns
from stoker.cache.writer import QUEUE_BYTES, Writer
from strategies import FULL, few, one_in

MIB = 1 << 20


@contextlib.contextmanager
def memory() -> Iterator[str]:
    """A folder of its own for stores in memory, where files take whole pages and no more."""
    parent = os.path.join(location.make_memory_folder(), f"test-{secrets.token_hex(8)}")
    os.mkdir(parent)
    try:
        yield parent
    finally:
        shutil.rmtree(parent)


def play(tmp_path: Path, body: str) -> list[Any]:
    """Run a script to its good end."""
    here = tmp_path / f"script-{secrets.token_hex(4)}"
    here.mkdir()
    return run(here, PRELUDE + body)


@contextlib.contextmanager
def started(tmp_path: Path, body: str) -> Iterator[Script]:
    """Run a script beside the test."""
    here = tmp_path / "script"
    here.mkdir()
    with script(here, PRELUDE + textwrap.dedent(body)) as running:
        yield running


def wait_for_status(pid: int, *statuses: str) -> None:
    wait_until(lambda: psutil.Process(pid).status() in statuses)


@contextlib.contextmanager
def service(tmp_path: Path, *command: str) -> Iterator[Callable[[str], Any]]:
    """Run a program that is told of folders; return what asks it, and checks that it survived."""
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as running,
    ):
        assert running.stdin is not None
        assert running.stdout is not None
        to, back = running.stdin, running.stdout

        def ask(folder: str) -> Any:
            to.write(folder + "\n")
            to.flush()
            answer = json.loads(back.readline())
            assert not isinstance(answer, int), f"the user of the cache ended with {answer}"
            assert json.loads(back.readline()) == 0
            return answer

        yield ask
        to.close()
        assert running.wait(200) == 0


def allocated(folder: str) -> int:
    return os.stat(os.path.join(folder, DATA)).st_blocks * 512


# -- what goes in comes out


@given(
    batches=st.lists(
        st.lists(
            st.tuples(st.integers(0, 30), st.sampled_from([0, 1, 100, 5000, 70_000])),
            max_size=8,
            unique_by=lambda pair: pair[0],
        ),
        max_size=5,
    )
)
def test_what_came_first_under_a_key_stays(batches: list[list[tuple[int, int]]]) -> None:
    kept: dict[int, bytes] = {}
    with (
        tempfile.TemporaryDirectory() as parent,
        opened(os.path.join(parent, "cache"), 8 * MIB) as store,
    ):
        for batch in batches:
            new: dict[int, bytes] = {}
            for n, size in batch:
                if n not in kept:
                    new.setdefault(n, content(n, size))
            refused = store.add([item(n, size) for n, size in batch])
            assert [entry.key for entry in refused] == [key(n) for n, _ in batch if n in kept]
            kept |= new
            assert found(store, range(31)) == kept
        assert store.holds([key(n) for n in range(31)]) == [n in kept for n in range(31)]
        assert sorted(keys_in(store)) == sorted(key(n) for n in kept)
        assert store.counters.head[ITEMS] == len(kept)
        assert store.counters.head[PAYLOAD_BYTES] == sum(map(len, kept.values()))


def test_one_key_twice_at_once_is_one_item(folder: str) -> None:
    twice = [item(1, 10), item(2, 10), StoredItem(key(1), [content(1, 20)], 20, USER)]
    with opened(folder) as store:
        assert len(store.add(twice)) == 1
        assert len(store.add(twice)) == 3
        assert len(keys_in(store)) == 2
        assert len(found(store, [1, 2])) == 2


# -- room


def test_a_key_that_is_none_leaves_the_others_found(folder: str) -> None:
    """A file that is gone has no key."""
    with opened(folder) as store:
        store.add([item(1)])
        assert store.holds([key(1), b"", key(2)]) == [True, False, False]


def test_threads_of_one_process_write_one_after_another(folder: str) -> None:
    """Who writes is known from outside until the last of it is written."""
    with opened(folder) as store:
        other = threading.Thread(target=store.add, args=([item(9)],))

        class Slow(list[StoredItem]):
            def __iter__(self) -> Iterator[StoredItem]:
                yield self[0]
                if not other.ident:
                    other.start()
                    other.join(0.5)  # it cannot end before this one
                    assert store.counters.head[WRITING]
                    assert other.is_alive()
                yield from self[1:]

        store.add(Slow([item(1), item(2)]))
        other.join()
        assert store.holds([key(1), key(2), key(9)]) == [True] * 3


def test_the_next_first_user_begins_anew(folder: str) -> None:
    """What took room in the counters is gone, and a disk that was full may have room again."""
    with opened(folder) as store:
        for n in range(1, ROWS + 1):
            store.counters.add((n, n), hits=1)
        store.counters.head[ENDED] = 1
        assert store.is_full
        assert store.counters.of((1, 1)).hits == 1
    with opened(folder) as store:
        assert not store.is_full
        assert store.counters.of((1, 1)).hits == 0
        store.add([item(1)])
        assert store.holds([key(1)]) == [True]


@pytest.mark.parametrize("size", [1900, 3080, 4090])
@pytest.mark.parametrize("batch", [2000, 250])
def test_small_items_share_pages(size: int, batch: int) -> None:
    numbers = range(2000)
    with memory() as parent, opened(os.path.join(parent, "cache"), 16 * MIB) as store:
        for start in numbers[::batch]:
            store.add([item(n, size) for n in numbers[start : start + batch]])
        assert found(store, numbers) == {n: content(n, size) for n in numbers}
        # Pages of the index that a transaction replaces are free for the next one but one.
        assert store.counters.head[USED_BYTES] <= 1.2 * 2000 * size
        assert allocated(store.folder) <= 1.2 * 2000 * size


def test_items_that_come_one_by_one_are_gathered_to_share_pages(folder: str) -> None:
    with opened(folder, 16 * MIB) as store, writing(store) as writer:
        for n in range(400):
            assert writer.offer(item(n, 2100))
            time.sleep(0.001)  # as an item is read and decoded
        assert writer.flush(60)
        assert len(found(store, range(400))) == 400
        # Alone, each would take a page; a pack of ten wastes a tenth at most.
        assert store.counters.head[USED_BYTES] <= 1.4 * 400 * 2100


@given(
    pages=st.integers(256, 600),
    batches=st.lists(
        st.lists(
            st.one_of(st.integers(0, 5000), st.integers(0, 400_000), st.just(65536)), max_size=40
        ),
        max_size=12,
    ),
)
def test_the_budget_holds_and_nothing_leaves(pages: int, batches: list[list[int]]) -> None:
    limit = pages * 4096
    with memory() as parent, opened(os.path.join(parent, "cache"), limit) as store:
        kept: dict[int, bytes] = {}
        n = 0
        for sizes in batches:
            was_full = store.is_full
            offered = {n + i: content(n + i, size) for i, size in enumerate(sizes)}
            refused = store.add([item(m, len(value)) for m, value in offered.items()])
            n += len(sizes)
            gone = {entry.key for entry in refused}
            entered = {m: value for m, value in offered.items() if key(m) not in gone}
            assert len(refused) == len(offered) - len(entered)
            if was_full:
                assert not entered, "a full store took something"
            kept |= entered
            assert found(store, range(n)) == kept
            assert store.counters.head[USED_BYTES] <= limit
            assert allocated(store.folder) <= limit
            assert os.path.getsize(os.path.join(store.folder, DATA)) == limit


@pytest.mark.parametrize("size", [500, 3080, 20_000, 110_000])
def test_a_store_fills_before_it_is_full_and_stays_as_it_is(size: int) -> None:
    limit = 4 * MIB
    with memory() as parent, opened(os.path.join(parent, "cache"), limit) as store:
        n = 0
        while not store.is_full:
            assert n * size < 2 * limit, "it is never full"
            step = max(10, 200_000 // size)
            store.add([item(m, size) for m in range(n, n + step)])
            n += step
        before = found(store, range(n))
        assert before == {m: content(m, size) for m in before}
        payload = len(before) * size
        assert payload >= 0.7 * limit
        assert allocated(store.folder) <= limit
        used = int(store.counters.head[USED_BYTES])
        for m in range(n, n + 200):
            assert len(store.add([item(m, 1 + m % size)])) == 1
        assert found(store, range(n + 200)) == before
        assert store.counters.head[USED_BYTES] == used


def test_something_too_large_alone_does_not_fill_a_store(folder: str) -> None:
    with opened(folder) as store:
        store.add([item(n, 2000) for n in range(10)])
        refused = store.add([item(10, 2 * LIMIT)])
        assert [entry.key for entry in refused] == [key(10)]
        assert not store.is_full
        assert store.add([item(11, 2000)]) == []


def test_readers_that_were_killed_cost_no_room(tmp_path: Path) -> None:
    """Who reads keeps pages from being used again; who was killed while reading does not."""

    def filled(parent: str, readers: bool) -> int:
        inside = os.path.join(parent, f"cache-{readers}")
        hold = joined(inside, 2 * MIB)
        try:
            if readers:
                body = f"""
                    with opened({inside!r}) as store:
                        store.add([item(0)])

                    def die(record):
                        os.kill(os.getpid(), signal.SIGKILL)

                    def read_and_die():
                        store = Store({inside!r}, {2 * MIB})
                        store.get_many([key(0)], die, unharmed)

                    say(json.dumps(ended([forked(read_and_die) for _ in range(3)])))
                """
                assert play(tmp_path, textwrap.dedent(body)) == [[-9, -9, -9]]
            store = Store(inside, 2 * MIB)
            n = 1
            while not store.is_full:
                store.add([item(n, 3000)])
                n += 1
            store.close()
            return n
        finally:
            hold.leave()

    with memory() as parent:
        assert filled(parent, readers=True) >= filled(parent, readers=False) - 10


# -- several at once


def test_several_processes_write_at_once(tmp_path: Path, folder: str) -> None:
    body = f"""
        hold = joined({folder!r}, 16 << 20)

        def write(first):
            store = Store({folder!r}, 16 << 20)
            numbers = list(range(first, 600, 2))  # each item is offered by two
            for start in range(0, len(numbers), 7):
                patiently(store, map(item, numbers[start : start + 7]))
                assert not wrong(found(store, numbers[: start + 7]))
            store.close()

        assert ended([forked(lambda: write(i % 2)) for i in range(4)]) == [0] * 4
        say(json.dumps(whole({folder!r}, 16 << 20, 700)))
        hold.leave()
    """
    (seen,) = play(tmp_path, textwrap.dedent(body))
    assert seen["items"] == seen["counted"] == 600
    assert (seen["wrong"], seen["strangers"], seen["in budget"]) == ([], 0, True)


ROUNDS = 8


@pytest.mark.parametrize("batch", range(13 if FULL else 1))
def test_writers_killed_at_any_moment_leave_whole_items(
    tmp_path: Path, folder: str, batch: int
) -> None:
    """Three writers at a time, from joining the store on; then who looks at it, after each kill."""
    limit, most = 24 * MIB, 20_000
    body = f"""
        limit, most = {limit}, {most}
        rng = random.Random({batch})

        def write(seed):
            rng = random.Random(seed)
            hold = joined({folder!r}, limit)
            store = Store({folder!r}, limit)
            os.write(writes, b".")
            while True:
                patiently(store, [item(rng.randrange(most)) for _ in range(rng.randrange(1, 30))])
                os.write(writes, b".")

        def look():
            say(json.dumps(whole({folder!r}, limit, most)))

        moments = 0
        while moments < {ROUNDS}:
            reads, writes = os.pipe()
            running = [forked(lambda: write(rng.random())) for _ in range(3)]
            os.close(writes)
            try:
                while running:
                    # From before they have joined to well within their writing: after some commits.
                    for _ in range(rng.choice([0, 3, 6, 12])):
                        os.read(reads, 1)
                    time.sleep(rng.random() / 200)
                    victim = running.pop(rng.randrange(len(running)))
                    os.kill(victim, signal.SIGKILL)
                    assert ended([victim]) == [-9]
                    assert ended([forked(look)]) == [0]
                    moments += 1
            finally:
                for left in running:
                    os.kill(left, signal.SIGKILL)
            os.close(reads)
            look()  # alone: the store is checked, and would be made anew if it were damaged
    """
    seen = play(tmp_path, "import random\n" + textwrap.dedent(body))
    assert len(seen) >= ROUNDS
    for one in seen:
        assert (one["wrong"], one["strangers"], one["bytes"]) == ([], 0, limit)
    items = [one["items"] for one in seen]
    assert items == sorted(items)  # nothing leaves
    assert items[-1] > 0


SUDDEN = """
    class Sudden(list):
        def __iter__(self):
            os.kill(os.getpid(), signal.{name})
            return super().__iter__()

    with opened({folder!r}) as store:
        store.add([item(1)])
        store.add([item(2)._replace(record=Sudden(item(2).record))])
    say("done")
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_writer_that_ends_or_stops_within_a_transaction(
    tmp_path: Path, folder: str, name: str
) -> None:
    """Whoever stops holds all locks there are. The others read on, and what they offer waits."""
    body = SUDDEN.format(folder=folder, name=name)
    with opened(folder) as store, started(tmp_path, body) as other:
        assert found(store, [1]) in ({}, {1: content(1)})  # from now on it is open
        wait_for_status(other.pid, psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        assert found(store, [1, 2]) == {1: content(1)}
        if name == "SIGSTOP":
            with pytest.raises(StoreLocked):
                store.add([item(3)])
            with writing(store) as writer:
                assert writer.offer(item(4))
                assert not writer.flush(0.2)
                assert writer.offer(item(5))
                large = StoredItem(key(6), [bytes(QUEUE_BYTES)], QUEUE_BYTES, USER)
                assert not writer.offer(large)  # nobody waits, and no more is kept than is said
                assert found(store, range(7)) == {1: content(1)}
                os.kill(other.pid, signal.SIGCONT)
                assert writer.flush(60)
            assert other.line() == "done"
            assert other.finish()[0] == 0
        else:
            other.finish()
            patiently(store, map(item, [4, 5]))
        there = found(store, range(7))
        assert wrong(there) == []
        assert sorted(there) == ([1, 2, 4, 5] if name == "SIGSTOP" else [1, 4, 5])


def test_who_comes_while_a_writer_is_stopped_waits_for_nobody(tmp_path: Path, folder: str) -> None:
    """What cannot be looked up just now is missing, and read from the source."""
    newcomer = f"""
        store = Store({folder!r}, LIMIT)
        there = found(store, [1, 2])
        try:
            store.add([item(3)])
        except StoreLocked:
            say(json.dumps([2 in there, wrong(there), store.holds([key(2)])]))
    """
    with started(tmp_path, SUDDEN.format(folder=folder, name="SIGSTOP")) as other:
        wait_for_status(other.pid, psutil.STATUS_STOPPED)
        # SIGALRM ends it where it waits.
        assert play(tmp_path, "signal.alarm(150)\n" + textwrap.dedent(newcomer)) == [
            [False, [], [False]]
        ]
        os.kill(other.pid, signal.SIGCONT)
        assert other.finish()[0] == 0
    with opened(folder) as store:
        assert sorted(found(store, [1, 2, 3])) == [1, 2]


@contextlib.contextmanager
def writing(store: Store) -> Iterator[Writer]:
    writer = Writer(store, lambda refused: None, unexpected)
    try:
        yield writer
    finally:
        writer.close(30)


def unexpected(error: OSError) -> None:
    raise AssertionError(str(error))


def test_what_is_offered_is_written_and_what_is_refused_is_told(folder: str) -> None:
    told: list[StoredItem] = []
    with opened(folder, 8 * MIB) as store:
        writer = Writer(store, told.extend, unexpected)
        for n in range(300):
            assert writer.offer(item(n))
        assert writer.flush(60)
        assert told == []
        assert writer.offer(item(7))
        assert writer.flush(60)
        assert [entry.key for entry in told] == [key(7)]
        assert wrong(found(store, range(300))) == []
        writer.close(60)
        assert not writer.offer(item(301))
        assert writer.flush(0)


# -- nothing can be written any more


@contextlib.contextmanager
def small_disk(tmp_path: Path) -> Iterator[str]:
    """A tmpfs of two mebibytes."""
    point = tmp_path / "disk"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(point)]
    if os.getuid() or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a small tmpfs")
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs root that may mount a small tmpfs")
    try:
        yield str(point)
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


# A file that is mapped and has no room ends its process with a signal: these are scripts.


@pytest.mark.parametrize("temporary", [True, False])
def test_a_disk_that_fills_is_a_warning_and_no_error(tmp_path: Path, temporary: bool) -> None:
    with small_disk(tmp_path) as point:
        inside = os.path.join(point, "cache")
        body = f"""
            from stoker.cache.handles import Handle
            handle = Handle(joined({inside!r}, {8 * MIB}, temporary={temporary}))
            for n in range(20):
                assert handle.writer.offer(item(n))
            assert handle.writer.flush(30)
            fill({point!r})
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for n in range(20, 200):
                    handle.writer.offer(item(n))
                assert handle.writer.flush(30)
            assert handle.store.is_full
            assert len(handle.store.add([item(200)])) == 1
            there = found(handle.store, range(200))
            assert wrong(there) == []
            assert set(range(20)) <= set(there)
            handle.close()
            say(json.dumps([len(there), [(w.category.__name__, str(w.message)) for w in caught]]))
        """
        ((n, ((kind, words),)),) = play(tmp_path, textwrap.dedent(body))
        assert kind == "CacheWarning"
        assert "stores no more examples" in words
        assert "its disk has " in words
        assert os.path.exists(inside) is not temporary
        if not temporary:  # full as the disk is, it can be joined again
            again = f"say(json.dumps(whole({inside!r}, {8 * MIB}, 200)))"
            (seen,) = play(tmp_path, again)
            assert (seen["items"], seen["wrong"]) == (n, [])


def test_a_full_disk_kills_nobody_who_counts(tmp_path: Path) -> None:
    with small_disk(tmp_path) as point, opened(os.path.join(point, "cache"), 8 * MIB) as store:
        fill(point)
        body = f"""
            store = Store({store.folder!r}, {8 * MIB})
            for user in range(1, 200):
                store.counters.add((user, user), hits=1)
            say(json.dumps(sum(store.counters.of((user, user)).hits for user in range(1, 200))))
        """
        assert play(tmp_path, textwrap.dedent(body)) == [199]


def test_a_full_disk_kills_nobody_who_reads(tmp_path: Path) -> None:
    with small_disk(tmp_path) as point, opened(os.path.join(point, "cache"), 8 * MIB) as store:
        store.add([item(0)])
        fill(point)
        body = f"""
            store = Store({store.folder!r}, {8 * MIB})
            barrier = threading.Barrier(150)
            got = []

            def held(record):
                barrier.wait(150)  # until all of them are reading
                return bytes(record)

            def read():
                got.extend(store.get_many([key(0)], held, unharmed))

            threads = [threading.Thread(target=read) for _ in range(150)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            say(json.dumps(got.count(content(0))))
        """
        assert play(tmp_path, textwrap.dedent(body)) == [150]


def test_where_there_is_no_room_for_a_store_nothing_is_left(tmp_path: Path) -> None:
    with small_disk(tmp_path) as point:
        fill(point)
        body = f"""
            try:
                joined({point + "/cache"!r}, {8 * MIB})
            except OSError as error:
                say(json.dumps("refused"))
        """
        assert play(tmp_path, textwrap.dedent(body)) == ["refused"]
        assert os.listdir(point) == ["filler"]


# -- damage


def said(folder: str) -> Any:
    return json.loads(Path(folder, "about.json").read_bytes())


def say_instead(folder: str, **changes: Any) -> None:
    Path(folder, "about.json").write_text(json.dumps({**said(folder), **changes}))


def head_of(folder: str) -> list[int]:
    return read_head(Path(folder, "counters").read_bytes())


def set_head(folder: str, at: int, value: int) -> None:
    with contextlib.closing(Counters(os.path.join(folder, "counters"))) as counters:
        counters.head[at] = value


def cut(folder: str, size: int) -> None:
    os.truncate(os.path.join(folder, DATA), size)


def overwrite(folder: str, at: int, data: bytes) -> None:
    with open(os.path.join(folder, DATA), "r+b") as file:
        file.seek(at)
        file.write(data)


def write(folder: str, name: str, data: bytes) -> None:
    Path(folder, name).write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[str], object], str]] = {
    "half of it": (lambda f: cut(f, LIMIT // 2), r"has 524,288 bytes instead of 1,048,576"),
    "nothing": (lambda f: cut(f, 0), r"has 0 bytes instead of 1,048,576"),
    "too much": (lambda f: cut(f, LIMIT + 4096), r"has 1,052,672 bytes instead of 1,048,576"),
    "no file": (lambda f: os.unlink(os.path.join(f, DATA)), r"No such file"),
    "no beginning": (lambda f: overwrite(f, 0, bytes(8192)), r"another program has changed"),
    "zeros": (lambda f: overwrite(f, 0, bytes(LIMIT)), r"another program has changed"),
    "zeros inside": (lambda f: overwrite(f, 8192, bytes(LIMIT - 8192)), r"another program has"),
    "about: garbage": (lambda f: write(f, "about.json", b"\xff{"), r"about.json cannot be read"),
    "about: empty": (lambda f: write(f, "about.json", b""), r"about.json cannot be read"),
    "about: other": (lambda f: write(f, "about.json", b"[1]"), r"about.json cannot be read"),
    "about: text": (lambda f: say_instead(f, limit_bytes="1"), r"about.json cannot be read"),
    "about: gone": (lambda f: os.unlink(os.path.join(f, "about.json")), r"about.json cannot be"),
    "format": (
        lambda f: say_instead(f, format=7),
        r"has format 7, but this version of stoker uses 6",
    ),
    "other limit": (lambda f: say_instead(f, limit_bytes=4096), r"bytes instead of 4,096"),
}


FILES = ("data.mdb", "counters", "about.json", "lock.mdb", "users", "admission")

USING = """
import json, os, sys, warnings
import stoker

items = [bytes([n]) * (100 + 40 * n * n) for n in range(60)]

def use(folder):
    pipeline = stoker.from_dataset(items, seed=0)
    pipeline = pipeline.cache("2MiB", path=folder, version="1").workers(0)
    for _ in range(2):
        assert list(pipeline) == items
    return pipeline.stats().cache.hits

def told(folder):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hits = use(folder)
    assert all(w.category is stoker.CacheWarning for w in said), [str(w.message) for w in said]
    return "rebuilt" if said else "right"

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            answer = told(line.strip())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
        os._exit(0)
    print(json.dumps(os.waitpid(pid, 0)[1]), flush=True)
"""


def flipped(folder: str, name: str, at: int, data: bytes, restored: bool) -> None:
    """Damage a file; it stays as long as it was, and may look as old as it was."""
    path = os.path.join(folder, name)
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(len(data))
        file.seek(at)
        file.write(bytes(a ^ b for a, b in zip(old, data, strict=False)))
    if restored:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


few_bytes = st.integers(0, 40)
places = st.one_of(
    st.tuples(st.just(DATA), st.integers(0, 8191)),  # the pages that LMDB opens it by
    st.tuples(st.just(DATA), st.builds(lambda p, b: 4096 * p + b, st.integers(0, 40), few_bytes)),
    st.tuples(st.just(DATA), st.integers(0, 2 * MIB - 1)),
    st.tuples(st.just("counters"), st.integers(0, 4500)),
    st.tuples(st.sampled_from(FILES), st.integers(0, 300)),
)


@pytest.mark.full
def test_damage_anywhere_is_mended(tmp_path: Path) -> None:
    """As users meet it: the right data, or a warning that it is made anew."""
    model = str(tmp_path / "model")

    @few(1)
    @given(places, st.binary(min_size=1, max_size=40), st.booleans())
    @example((DATA, 16), b"\xff", True)
    @example((DATA, 4116), b"\xff", True)
    def check(where: tuple[str, int], data: bytes, restored: bool) -> None:
        inside = str(tmp_path / f"cache-{secrets.token_hex(8)}")
        shutil.copytree(model, inside)
        assert outcome(inside) == "rebuilt"  # a copy
        assert outcome(inside) == "right"
        flipped(inside, *where, data, restored)
        first = outcome(inside)
        assert first in ("right", "rebuilt")
        # An item was found to be damaged when it was read: it is made anew now.
        assert outcome(inside) in ("right", first)
        assert outcome(inside) == "right"
        inventory.remove(inside)

    with service(tmp_path, "-c", USING) as outcome:
        assert outcome(model) == "right"
        if FULL:
            check = example((DATA, 20), b"\xff", True)(check)
            check = example((DATA, 40), b"\xff", True)(check)
        check()


@pytest.mark.parametrize("at", [16, 20, 40, 4112, 4116])
def test_a_store_that_is_damaged_while_it_is_used(folder: str, at: int) -> None:
    """Who comes then reads from the source; who comes when all have left makes it anew."""
    items = [bytes([n]) * 1000 for n in range(20)]

    def cached() -> stoker.Pipeline:
        source = stoker.from_dataset(items, seed=0)
        return source.cache("2MiB", path=folder, version="1").workers(0)

    with opened(folder, 2 * MIB):
        flipped(folder, DATA, at, b"\xff", True)
        with pytest.warns(stoker.CacheWarning, match="Damaged examples are read from the source"):
            assert list(cached()) == items
    with pytest.warns(stoker.CacheWarning, match="rebuilt"):
        assert list(cached()) == items


@pytest.mark.parametrize(("harm", "named"), one_in(3, DAMAGES.values()), ids=DAMAGES.keys())
def test_damage_is_found_and_named(folder: str, harm: Callable[[str], object], named: str) -> None:
    with opened(folder) as store:
        store.add([item(n) for n in range(30)])
    harm(folder)
    with pytest.warns(stoker.CacheWarning, match=rf"damaged \(.*{named}.*rebuilt"):
        joined(folder, 2 * MIB).leave()
    with opened(folder) as store:
        assert store.limit_bytes == 2 * MIB
        assert keys_in(store) == []
        assert store.add([item(n) for n in range(30)]) == []
    with opened(folder) as store:
        assert len(found(store, range(30))) == 30
    assert [e.name for e in os.scandir(os.path.dirname(folder)) if e.name.startswith(".")] == []


def test_what_was_in_use_when_the_machine_went_down_is_made_anew(folder: str) -> None:
    """Nobody is to blame: there is no warning. What had been closed is trusted."""
    with opened(folder) as store:
        store.add([item(1)])
    say_instead(folder, boot="another")
    with opened(folder) as store:
        assert list(found(store, [1])) == [1]
        assert said(folder)["boot"] == store_dir.boot_id()
    say_instead(folder, boot="another")
    set_head(folder, IN_USE, 1)
    with opened(folder) as store:
        assert keys_in(store) == []


@pytest.mark.parametrize("temporary", [False, True])
def test_what_was_in_use_when_its_users_were_killed_is_kept_or_made_anew(
    tmp_path: Path, folder: str, temporary: bool
) -> None:
    body = f"""
        def use():
            hold = joined({folder!r}, temporary={temporary})
            Store({folder!r}, LIMIT).add([item(1)])
            os.kill(os.getpid(), signal.SIGKILL)

        say(json.dumps(ended([forked(use)])))
    """
    assert play(tmp_path, textwrap.dedent(body)) == [[-9]]
    assert head_of(folder)[IN_USE]
    with opened(folder, temporary=temporary) as store:
        assert found(store, [1]) == ({} if temporary else {1: content(1)})
    assert os.path.exists(folder) is not temporary
    assert temporary or not head_of(folder)[IN_USE]


def test_a_file_that_changed_is_a_killed_writer_s_or_another_program_s(folder: str) -> None:
    with opened(folder) as store:
        store.add([item(1)])
    data = os.path.join(folder, DATA)
    os.utime(data)
    set_head(folder, WRITING, 1)  # as one that was killed leaves it
    with opened(folder) as store:
        assert found(store, [1]) == {1: content(1)}
    os.utime(data)
    with pytest.warns(stoker.CacheWarning, match="another program has changed data.mdb"):
        joined(folder).leave()


def test_who_waits_for_the_last_user_to_leave_is_the_first(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should it be killed, nobody takes what it left for what was closed."""
    joined(folder).leave()
    last = os.open(os.path.join(folder, "users"), os.O_RDWR)
    fcntl.flock(last, fcntl.LOCK_EX)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        fcntl.flock(last, fcntl.LOCK_UN)

    monkeypatch.setattr(store_dir.time, "sleep", sleep)
    hold = joined(folder)
    assert len(waited) == 1
    assert head_of(folder)[IN_USE]
    hold.leave()
    os.close(last)


@pytest.mark.parametrize("name", ["lock.mdb", "counters", "admission"])
@pytest.mark.parametrize("data", [None, b"", b"\xff" * 5000], ids=["gone", "empty", "garbage"])
def test_files_that_hold_no_items_are_made_again(
    folder: str, name: str, data: bytes | None
) -> None:
    with opened(folder) as store:
        store.add([item(n) for n in range(10)])
    if data is None:
        os.unlink(os.path.join(folder, name))
    else:
        write(folder, name, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stoker.CacheWarning)  # either way, it works
        with opened(folder) as store:
            there = found(store, range(10))
            assert wrong(there) == []
            assert len(there) in (0, 10)
            store.add([item(n) for n in range(20)])
            if not store.is_full:
                assert len(found(store, range(20))) == 20


@pytest.mark.full
@few(4)
@given(n=st.integers(0, 29), at=st.integers(0), flip=st.integers(1, 255), restored=st.booleans())
def test_an_item_that_is_not_as_it_was_written_is_missing(
    n: int, at: int, flip: int, restored: bool
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        inside = os.path.join(parent, "cache")
        with opened(inside) as store:
            store.add([item(m) for m in range(30)])
        data = Path(inside, DATA)
        times = os.stat(data)
        start = data.read_bytes().index(content(n)) + at % len(content(n))
        overwrite(inside, start, bytes([data.read_bytes()[start] ^ flip]))
        if restored:
            os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
        set_head(inside, DATA_NS, changed_ns(inside))  # as when a disk forgets
        told: list[str] = []
        with opened(inside) as store:
            for _ in range(2):
                there = found(store, range(30), told.append)
                assert wrong(there) == []
                assert sorted(there) == [m for m in range(30) if m != n]
        assert told == [f"item {key(n).hex()}"] * 2


SERVICE = """
import json, os, sys, warnings
sys.path.insert(0, sys.argv[1])
from stores import *
from stoker.errors import CacheWarning

def read(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = []
        with opened(folder) as store:
            there = found(store, range(100), told.append)
            report = {"wrong": wrong(there), "items": len(there), "told": len(told)}
            try:
                store.add([item(n) for n in range(100, 120)])
            except OSError as error:
                report["error"] = str(error)
            more = found(store, range(120), told.append)
            report["wrong after"] = wrong(more)
            report["lost"] = len(set(there) - set(more))
    report["strange"] = [str(w.message) for w in caught if w.category is not CacheWarning]
    print(json.dumps(report), flush=True)

for line in sys.stdin:
    code = ended([forked(lambda: read(line.strip()))])[0]
    print(json.dumps(code), flush=True)
"""

positions = st.one_of(
    st.integers(0, 8191),  # LMDB's own pages
    st.builds(lambda page, byte: 4096 * page + byte, st.integers(0, 255), st.integers(0, 40)),
    st.integers(0, LIMIT - 1),
)


@pytest.mark.full
def test_whatever_is_overwritten_what_comes_back_is_right(tmp_path: Path) -> None:
    """The reader is a process of its own each time, and survives."""
    model = str(tmp_path / "model")
    with opened(model) as store:
        for start in range(0, 80, 10):
            store.add([item(n) for n in range(start, start + 10)])
            if start < 40:
                assert store.add([item(1000 + start, 70_000)]) == []

    @few(4)
    @given(
        st.lists(
            st.tuples(positions, st.one_of(st.binary(min_size=1, max_size=64), st.just(bytes(16)))),
            min_size=1,
            max_size=4,
        )
    )
    def check(places: list[tuple[int, bytes]]) -> None:
        inside = str(tmp_path / f"cache-{secrets.token_hex(8)}")
        shutil.copytree(model, inside)
        for at, data in places:
            overwrite(inside, min(at, LIMIT - len(data)), data)
        said = ask(inside)
        assert (said["wrong"], said["wrong after"], said["strange"]) == ([], [], [])
        assert said["lost"] == 0
        inventory.remove(inside)

    with service(tmp_path, "-W", "error", "-c", SERVICE, HERE) as ask:
        check()


# -- folders: who comes, who goes, and what stays


def test_a_store_is_its_owners_alone(folder: str) -> None:
    before = os.umask(0)
    try:
        with opened(folder) as store:
            store.add([item(1)])
            modes = {e.name: stat.S_IMODE(e.stat().st_mode) for e in os.scandir(folder)}
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        modes |= {e.name: stat.S_IMODE(e.stat().st_mode) for e in os.scandir(folder)}
        with memory() as parent:
            assert stat.S_IMODE(os.stat(os.path.dirname(parent)).st_mode) == 0o700
    finally:
        os.umask(before)
    assert {DATA, "about.json", "users", "counters"} <= set(modes)
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("temporary", [True, False])
@given(comings=st.lists(st.integers(0, 3), max_size=20))
def test_a_temporary_store_is_there_as_long_as_its_users(
    temporary: bool, comings: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        inside = os.path.join(parent, "cache")
        holds: dict[int, store_dir.StoreDir] = {}
        existed = False
        for who in comings:
            if who in holds:
                holds.pop(who).leave()
            else:
                holds[who] = joined(inside, temporary=temporary)
            existed = True
            assert inventory.is_store(inside) is (bool(holds) or not temporary)
            assert inventory.is_in_use(inside) is bool(holds)
            assert inside not in inventory.sweep()  # other tests may leave something meanwhile
            if holds:
                with pytest.raises(stoker.CacheError, match="in use"):
                    inventory.remove(inside)
        for hold in holds.values():
            hold.leave()
        assert os.listdir(parent) == (["cache"] if existed and not temporary else [])
        if existed and not temporary:
            inventory.remove(inside)
        assert os.listdir(parent) == []


def test_many_come_and_go_at_once(tmp_path: Path, folder: str) -> None:
    # Room for all and more: while one reads, LMDB uses no page again that others give up.
    body = f"""
        def use(seed):
            for n in range(30):
                with opened({folder!r}, 8 * LIMIT, temporary=True) as store:
                    patiently(store, [item(100 * seed + n)])
                    there = found(store, range(500))
                    assert 100 * seed + n in there
                    assert not wrong(there)

        say(json.dumps(ended([forked(lambda: use(i)) for i in range(4)])))
    """
    assert play(tmp_path, textwrap.dedent(body)) == [[0] * 4]
    assert [e.name for e in os.scandir(os.path.dirname(folder)) if "script" not in e.name] == []


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_killed_users_leave_is_swept(tmp_path: Path, folder: str, in_memory: bool) -> None:
    if in_memory:
        folder = os.path.join(location.make_memory_folder(), f"test-{secrets.token_hex(8)}")
    kept = str(tmp_path / "kept")
    joined(kept).leave()
    body = f"""
        hold = joined({folder!r}, temporary=True)
        store = Store({folder!r}, LIMIT)
        store.add([item(1)])
        say("here")
        sys.stdin.read()
        time.sleep(60)
    """
    try:
        with started(tmp_path, body) as other:
            assert other.line() == "here"
            assert folder not in inventory.sweep()
            assert folder in inventory.find_stores()
            with opened(folder) as store:
                assert found(store, [1]) == {1: content(1)}
            assert inventory.is_store(folder)
            with Watch([other.pid]) as watch:
                os.kill(other.pid, signal.SIGKILL)
                assert watch.gone()
        inventory.sweep()  # if no other test's process was faster
        assert not os.path.exists(folder)
        assert inventory.is_store(kept)
        assert kept in inventory.find_stores()
        assert folder not in inventory.find_stores()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- forks


@pytest.mark.parametrize("forks", [100 if FULL else 15])
def test_forks_while_threads_read_and_write(tmp_path: Path, folder: str, forks: int) -> None:
    """Parent, children and grandchildren go on, each with a hold of its own."""
    body = f"""
        import random
        from stoker.cache.example_cache import ExampleCache
        from stoker.basics.fingerprint import Fingerprint
        from stoker.cache.store import MISSING

        # Newer Pythons warn of forks beside threads, which is what this is about.
        warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
        cache = ExampleCache(
            {16 * MIB}, path={folder!r}, keep=True, identity="forks", describes="forks",
            examples=4000,
        )
        stop = threading.Event()
        passed = [0] * 4
        errors = []

        def use(n):
            at = cache.key(Fingerprint(n), n)
            (value,) = cache.find([at])
            if value is MISSING:
                cache.offer(at, content(n))
            else:
                assert value == content(n)
            return value is not MISSING

        def work(who):
            rng = random.Random(who)
            try:
                while not stop.is_set():
                    use(rng.randrange(4000))
                    cache.count(refused=1)
                    passed[who] += 1
            except BaseException as error:
                errors.append(repr(error))

        def child():
            faulthandler.register(signal.SIGALRM, chain=True)
            signal.alarm(100)  # ends who waits for ever, and tells where
            for n in range(50):
                use(n)
            assert cache.flush(90)
            assert all([use(n) for n in range(50)])

        def parent():
            child()
            assert ended([forked(child)]) == [0]

        threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
        for thread in threads:
            thread.start()
        codes = []
        for number in range({forks}):
            codes += ended([forked(parent if number % 5 == 0 else child)])
            faulthandler.dump_traceback_later(210, exit=True)
        before = list(passed)
        give_up_at = time.monotonic() + 200
        while time.monotonic() < give_up_at and any(a == b for a, b in zip(before, passed)):
            time.sleep(0.01)  # all of them still get on
        went_on = all(a < b for a, b in zip(before, passed))
        stop.set()
        for thread in threads:
            thread.join()
        say(json.dumps([codes, went_on, errors, cache.stats().damaged]))
    """
    codes, went_on, errors, damaged = play(tmp_path, textwrap.dedent(body))[0]
    assert (codes, went_on, errors, damaged) == ([0] * forks, True, [], 0)
