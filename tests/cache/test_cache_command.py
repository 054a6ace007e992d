"""`stoker cache list | remove`, in processes of their own where others use the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stores import counted

import stoker
from command_line import Called, call, python
from scripts import script


def stoker_cache(*words: str | os.PathLike[str]) -> Called:
    """Call the command on a terminal that is wide enough for whole rows."""
    return call("cache", *words, columns=400)


def really(*words: str | os.PathLike[str]) -> tuple[int, str, str]:
    """Call the command in a process of its own."""
    done = python("-W", "error", "-m", "stoker", "cache", *words)
    return done.returncode, done.stdout, done.stderr


def row_of(name: str) -> str:
    """Return the line of the list that begins with a name; others' caches may be there too."""
    code, out, errors = stoker_cache("list")
    assert (code, errors) == (0, "")
    return next((line for line in out.splitlines() if line.split(" ")[0] == name), "")


def chain(count: int = 10) -> stoker.Pipeline:
    return stoker.from_arrays(np.zeros((count, 100)))


@pytest.fixture
def kept(tmp_path: Path) -> str:
    """A kept store of ten items that nobody uses."""
    folder = tmp_path / "store"
    pipeline = chain().cache("2MiB", path=folder, version="1").workers(0)
    for _ in range(2):
        list(pipeline)
    return str(folder)


@pytest.fixture
def temporary() -> Iterator[str]:
    """A store in memory, in use until the test has ended."""
    pipeline = chain().cache("2MiB").workers(0)
    list(pipeline)
    folder = counted(pipeline).folder
    yield folder
    del pipeline
    assert not os.path.exists(folder)


def test_without_caches_the_list_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests may have caches in memory at the same time; this user has none.
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    none = "no caches, neither in memory nor at a path that this user gave\n"
    assert stoker_cache("list") == (0, none, "")


def test_caches_are_listed(kept: str, temporary: str, tmp_path: Path) -> None:
    """With whether they are in use, and whether they are full."""
    of_both = ("from_arrays", " 10 ", "2.0 MiB")
    for part in (*of_both, "examples enter", "none", "until removed"):
        assert part in row_of(kept)
    pipeline = chain().cache("2MiB", path=kept, version="1").workers(0)
    with iter(pipeline) as rows:
        next(rows)
        assert " yes " in row_of(kept)
    for part in (*of_both, "yes", "while used"):
        assert part in row_of(os.path.basename(temporary))
    assert os.path.isdir(temporary)
    large = stoker.from_arrays(np.zeros((40, 10_000)))
    large = large.cache("1MiB", path=tmp_path / "full", version="1").workers(0)
    list(large)
    assert " full " in row_of(str(tmp_path / "full"))


def test_a_temporary_cache_on_a_disk_is_listed_by_its_path(tmp_path: Path) -> None:
    pipeline = chain().cache("2MiB", path=tmp_path / "store", keep=False).workers(0)
    list(pipeline)
    assert row_of(str(tmp_path / "store"))
    del pipeline
    assert not row_of(str(tmp_path / "store"))
    assert os.listdir(Path(os.environ["XDG_STATE_HOME"], "stoker", "caches")) == []


def test_what_was_removed_by_other_means_is_no_longer_listed(kept: str, tmp_path: Path) -> None:
    os.rename(kept, tmp_path / "elsewhere")
    assert not row_of(kept)
    assert os.listdir(Path(os.environ["XDG_STATE_HOME"], "stoker", "caches")) == []


def test_what_a_killed_process_left_is_removed_by_the_list(tmp_path: Path) -> None:
    store = tmp_path / "store"
    body = f"""
        pipeline = stoker.from_dataset(Examples(5)).cache("2MiB", path={str(store)!r}, keep=False)
        list(pipeline)
        say("there")
        time.sleep(100)
    """
    with script(tmp_path, body) as running:
        assert running.line() == "there"
    assert store.is_dir()
    code, out, errors = really("list")
    assert (code, errors) == (0, "")
    assert f"removed {store}: its users were killed" in out
    assert not store.exists()


def test_what_is_no_cache_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    for which in ("nothing-like-it", str(tmp_path / "mine"), str(tmp_path / "none")):
        code, out, errors = stoker_cache("remove", which)
        assert (code, out) == (1, "")
        says = f"there is no cache {which!r}: run stoker cache list to see all of them"
        assert errors == f"stoker cache: {says}\n"
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_cache_is_removed(kept: str, tmp_path: Path) -> None:
    code, out, errors = really("remove", kept)
    assert (code, out, errors) == (0, f"removed {kept}\n", "")
    assert not os.path.exists(kept)
    assert os.listdir(tmp_path) == []
    assert not row_of(kept)
    code, _, errors = really("remove", kept)
    assert code == 1
    assert "Traceback" not in errors


def test_a_cache_that_is_not_in_the_list_is_removed_by_its_folder(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert not row_of(kept)
    monkeypatch.chdir(tmp_path)
    code, out, errors = stoker_cache("remove", "store")
    assert (code, out, errors) == (0, f"removed {kept}\n", "")
    assert not os.path.exists(kept)


@pytest.mark.full
def test_a_cache_in_use_is_not_removed(kept: str, temporary: str) -> None:
    pipeline = chain().cache("2MiB", path=kept, version="1").workers(0)
    list(pipeline)
    for which, folder in ((kept, kept), (os.path.basename(temporary), temporary)):
        code, out, errors = really("remove", which)
        assert (code, out) == (1, "")
        assert (
            errors
            == f"stoker cache: the cache in {folder} is in use: end the jobs that use it first\n"
        )
        assert os.path.isdir(folder)
    list(pipeline)
    assert counted(pipeline).hits == 10


def test_a_cache_that_a_process_holds_is_removed_once_it_ended(tmp_path: Path) -> None:
    body = f"""
        pipeline = stoker.from_dataset(Examples(5))
        pipeline = pipeline.cache("2MiB", path={str(tmp_path / "store")!r}, version="1")
        list(pipeline)
        say(json.dumps(pipeline.stats().cache.folder))
        time.sleep(100)
    """
    with script(tmp_path, body) as running:
        folder = json.loads(running.line())
        assert really("remove", folder)[0] == 1
        assert os.path.isdir(folder)
    assert really("remove", folder)[0] == 0
    assert not os.path.exists(folder)
