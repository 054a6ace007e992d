"""Folders of stores, where others put things in the way: nothing of theirs or yours is harmed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from stores import PRELUDE, content, counted, found, item, joined, keys_in, opened

import stoker
from command_line import python
from descriptors import open_descriptors
from scripts import script
from stoker.cache import inventory, location
from stoker.cache.folder import CacheFolder
from stoker.cache.handles import HANDLES
from strategies import one_in

USER = 3_000_000_000 + os.getpid()  # another one than whoever runs this
MEMORY = f"/dev/shm/stoker-{USER}"
AS_USER = f"import os; os.getuid = lambda: {USER}\n"
"""Run in front of a program: what this test makes is another user's to it."""


@pytest.fixture
def memory() -> Iterator[str]:
    """The path where that user's stores in memory would be."""
    yield MEMORY
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MEMORY) if os.path.islink(MEMORY) else shutil.rmtree(MEMORY)


def program(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program; it must end."""
    return python("-W", "error", "-c", textwrap.dedent(code))


LIST = "import sys; sys.argv[1:] = ['cache', 'list']\nfrom stoker.cli import main; main()"
USE = """
import stoker
assert list(stoker.from_dataset(list(range(5))).cache("2MiB"{how}).workers(0)) == list(range(5))
"""


def store_of_nobody(path: str) -> None:
    """Make what looks like a temporary store whose users were killed."""
    with opened(path) as store:
        store.add([item(1)])
    about = json.loads(Path(path, "about.json").read_text())
    Path(path, "about.json").write_text(json.dumps({**about, "temporary": True}))


def tree(path: str) -> list[str]:
    return sorted(os.path.join(at, name) for at, _, names in os.walk(path) for name in names)


# -- other users


def test_what_another_user_made_in_memory_is_not_looked_at(memory: str, tmp_path: Path) -> None:
    """A pipe in it would be waited for, a store in it removed."""
    os.mkdir(memory, 0o700)
    for name in ("trap", "bait"):
        store_of_nobody(os.path.join(memory, name))
    os.unlink(os.path.join(memory, "trap", "about.json"))
    os.mkfifo(os.path.join(memory, "trap", "about.json"))
    os.mkdir(os.path.join(memory, ".gone-0123456789abcdef"), 0o700)
    before = tree(memory)
    done = program(AS_USER + LIST)
    assert done.returncode == 0, done.stderr
    assert f"{memory} does not belong to this user alone" in done.stderr
    assert "no caches" in done.stdout
    done = program(AS_USER + USE.format(how=""))
    assert f"CacheError: {memory} does not belong to this user alone" in done.stderr
    assert tree(memory) == before
    assert len(os.listdir(memory)) == 3


def test_where_another_user_made_it_a_path_does_as_well(memory: str, tmp_path: Path) -> None:
    os.mkdir(memory, 0o700)
    code = USE.format(how=f', path={str(tmp_path / "store")!r}, keep=True, version="1"')
    (tmp_path / "store").mkdir()
    # The folder of the store is this test's own, too: as that user it is refused.
    store_of_nobody(str(tmp_path / "mine"))
    done = program(AS_USER + code.replace("/store", "/mine"))
    assert (
        "CacheError: " + str(tmp_path / "mine") + " does not belong to this user alone"
        in done.stderr
    )
    done = program(code)
    assert (done.returncode, done.stderr) == (0, "")


UNPRIVILEGED = """
import os
if not os.getuid():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""
"""Run in front of a program: the system bars it from what it may not open, root or not."""


@pytest.mark.parametrize("whose", ["another's", "one's own"])
def test_a_store_that_cannot_be_opened_is_refused_at_once(whose: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:  # which everybody may reach
        os.chmod(parent, 0o777)
        path = os.path.join(parent, "cache")
        joined(path).leave()
        if whose == "one's own":
            os.chmod(path, 0)
            if not os.getuid():
                os.chown(path, 65534, 65534)
        elif os.getuid():
            pytest.skip("only root can have the store of another user")
        done = program(
            f"""
            from stoker.cache import store_dir
            from stoker.errors import CacheError
            {textwrap.indent(UNPRIVILEGED, " " * 12).lstrip()}
            try:
                store_dir.join({path!r}, limit_bytes=1 << 20, describes="a test", temporary=False)
            except CacheError as error:
                print(error)
            """
        )
        assert done.stdout.startswith(f"cannot open {path}: "), done.stderr
        assert os.listdir(parent) == ["cache"]
        os.chmod(path, 0o700)


@pytest.mark.parametrize("kind", one_in(2, ["link", "file"]))
def test_a_link_in_the_place_of_the_folder_in_memory_is_not_followed(
    memory: str, tmp_path: Path, kind: str
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    store_of_nobody(str(home / "project"))
    (home / "project" / "thesis.txt").write_text("all of it")
    (home / ".gone-0123456789abcdef").mkdir(mode=0o700)
    before = tree(str(home))
    if kind == "link":
        os.symlink(home, memory)
    else:
        Path(memory).write_text("")
        os.chmod(memory, 0o600)
    try:
        for code in (LIST, USE.format(how="")):
            done = program(AS_USER + code)
            assert f"{memory} does not belong to this user alone" in done.stderr
        assert tree(str(home)) == before
    finally:
        os.unlink(memory)


def test_what_others_may_write_to_is_no_store(folder: str) -> None:
    joined(folder).leave()
    os.chmod(folder, 0o777)
    with pytest.raises(
        stoker.CacheError, match=f"other users may write to it.*chmod go-w {folder}"
    ):
        joined(folder)
    assert not inventory.is_store(folder)
    os.chmod(folder, 0o755)
    joined(folder).leave()


def test_where_modes_are_not_kept_no_store_is_made(tmp_path: Path) -> None:
    """FAT has none, for example: ``mkdir`` does not say so."""
    code = f"""
        import os
        made = os.mkdir
        os.mkdir = lambda path, *a, **k: (made(path, *a, **k), os.chmod(path, 0o777))
        from stoker.cache import store_dir
        store_dir.join({str(tmp_path / "on" / "cache")!r}, limit_bytes=1 << 20,
            describes="a test", temporary=False)
    """
    done = program(code)
    says = f"cannot make a cache in {tmp_path / 'on'}: its file system does not keep permissions"
    assert f"CacheError: {says}" in done.stderr
    assert os.listdir(tmp_path / "on") == []


def test_a_folder_beside_the_one_in_memory_is_not_taken_for_it() -> None:
    memory = location.memory_folder()
    assert location.is_in_memory(os.path.join(memory, "cache"))
    assert not location.is_in_memory(f"{memory}-mine/cache")
    with tempfile.TemporaryDirectory(prefix=f"{memory}-") as parent:
        path = os.path.join(parent, "cache")
        joined(path).leave()
        assert path in inventory.find_stores()


def test_a_folder_whose_store_cannot_be_opened_is_left(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("stoker.cache.handles.Store", full)
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(MemoryError):
            HANDLES.get(folder, lambda: joined(folder))
    assert open_descriptors() <= before
    inventory.remove(folder)
    assert not os.path.exists(folder)


def fifo(path: str) -> None:
    os.unlink(path)
    os.mkfifo(path, 0o600)


def link(path: str) -> None:
    os.rename(path, f"{path}.real")
    os.rename(f"{path}.real", os.path.join(os.path.dirname(path), "..", "real"))
    os.symlink(os.path.join("..", "real"), path)


def link_to_a_terminal(path: str) -> None:
    os.unlink(path)
    os.symlink("/dev/ptmx", path)


def socket_there(path: str) -> None:
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as made:
        at = os.open(os.path.dirname(path), os.O_RDONLY)
        made.bind(f"/proc/self/fd/{at}/{os.path.basename(path)}")
        os.close(at)


def a_folder(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


@pytest.mark.parametrize("harm", [fifo, link, link_to_a_terminal, socket_there, a_folder])
@pytest.mark.parametrize("name", ["about.json", "data.mdb", "counters", "users"])
def test_what_is_no_file_is_neither_waited_for_nor_followed(
    folder: str, name: str, harm: Callable[[str], None]
) -> None:
    """Each is damage: named, and made anew."""
    with opened(folder) as store:
        store.add([item(1)])
    harm(os.path.join(folder, name))
    assert inventory.read_summary(folder) is None or name not in ("about.json", "counters")
    assert not inventory.is_in_use(folder)
    inventory.sweep(folder)
    if name == "users":  # nobody can tell whether it is used
        with pytest.raises(stoker.CacheError, match="cannot lock"):
            joined(folder)
        return
    with pytest.warns(stoker.CacheWarning, match="is damaged"):
        joined(folder).leave()
    with opened(folder) as store:
        assert keys_in(store) == []


def test_what_is_put_in_the_place_of_a_store_is_not_removed_for_it(
    tmp_path: Path, folder: str
) -> None:
    """Not even between the look at it and its removal."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("all of it")
    joined(folder).leave()
    with CacheFolder(folder) as held:
        os.rename(folder, tmp_path / "away")
        os.symlink(precious, folder)
        held.clear("users")
        assert not held.is_current()
    assert [e.name for e in os.scandir(precious)] == ["thesis.txt"]
    assert os.listdir(tmp_path / "away") == []


# -- folders of one's own


@pytest.mark.parametrize("about", [False, True])
def test_a_folder_that_only_looks_like_a_store_is_not_removed(folder: str, about: bool) -> None:
    """Others have a file ``users``, too."""
    if about:
        store_of_nobody(folder)
    else:
        os.mkdir(folder)
        Path(folder, "users").write_text("alice\nbob\n")
    Path(folder, "thesis.txt").write_text("all of it")
    before = tree(folder)
    inventory.sweep(folder)
    with pytest.raises(stoker.CacheError, match=r"holds (other files|files that are not)"):
        joined(folder)
    with pytest.raises(stoker.CacheError, match=r"holds files|is not a cache"):
        inventory.remove(folder)
    assert tree(folder) == before


KILLED = {
    "making": "Store.create = lambda *_: os.kill(os.getpid(), 9)\n",
    "made": """
real = os.rename
os.rename = lambda *a, **k: os.kill(os.getpid(), 9)
""",
    "removing": """
real = os.rename
os.rename = lambda *a, **k: (real(*a, **k), os.kill(os.getpid(), 9) if "gone" in a[1] else None)
""",
}


@pytest.mark.parametrize("moment", one_in(3, KILLED))
def test_what_killed_processes_leave_beside_a_store_is_swept(
    tmp_path: Path, folder: str, moment: str
) -> None:
    beside = tmp_path / "store" / "cache"
    body = PRELUDE + KILLED[moment] + f"joined({str(beside)!r}, temporary=True).leave()\n"
    with script(tmp_path, body) as running:
        assert running.finish()[0] == -9
    left = os.listdir(beside.parent)
    assert len(left) == 1
    assert left[0].startswith((".making-", ".gone-"))
    for name in (".making-movies", ".gone-fishing", ".gone-0123456789abcdef", ".making-away"):
        (beside.parent / name).mkdir()
        if "away" not in name:
            (beside.parent / name / "thesis.txt").write_text("all of it")
    before = tree(str(beside.parent))
    code = USE.format(how=f', path={str(beside)!r}, version="1"')
    done = program(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (beside.parent / left[0]).exists()
    assert {name for name in before if left[0] not in name} <= set(tree(str(beside.parent)))
    assert (beside.parent / ".making-away").exists()


@pytest.mark.parametrize("moment", ["mkdir", "open", "flock"])
def test_who_is_swept_before_it_has_its_lock_makes_another(folder: str, moment: str) -> None:
    """Whoever comes by at any moment before."""
    module = fcntl if moment == "flock" else os
    real = getattr(module, moment)
    seen: list[str] = []

    def swept(*args: object, **options: object) -> object:
        beside = [n for n in os.listdir(os.path.dirname(folder)) if n.startswith(".making-")]
        if moment == "mkdir":
            made = real(*args, **options)
            beside = [os.path.basename(str(args[0]))]
        if beside and not seen:
            seen.append(beside[0])
            inventory.sweep(folder)
        return made if moment == "mkdir" else real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, moment, swept)
        hold = joined(folder)
    assert len(seen) == 1
    assert not [n for n in os.listdir(os.path.dirname(folder)) if n.startswith(".")]
    hold.leave()
    with opened(folder) as store:
        assert store.add([item(1)]) == []


def test_what_is_being_made_is_not_swept(tmp_path: Path, folder: str) -> None:
    body = f"""
        real = Store.create
        def slowly(inside, limit):
            say("making")
            while not os.path.exists({str(tmp_path / "go")!r}):
                time.sleep(0.005)
            real(inside, limit)
        Store.create = slowly
        hold = joined({folder!r}, temporary=False)
        Store({folder!r}, LIMIT).add([item(1)])
        hold.leave()
    """
    with script(tmp_path, PRELUDE + textwrap.dedent(body)) as running:
        assert running.line() == "making"
        for _ in range(3):
            assert inventory.sweep(folder) == []
        (tmp_path / "go").touch()
        assert running.finish() == (0, "", "")
    with opened(folder) as store:
        assert found(store, [1]) == {1: content(1)}


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.filterwarnings("ignore:the cache in:stoker.CacheWarning")
def test_a_store_whose_folder_was_removed_is_used_on_and_another_is_made(
    tmp_path: Path, kind: str
) -> None:
    def build() -> stoker.Pipeline:
        data = stoker.from_arrays(np.arange(40)).map(lambda x: np.full(50, x))
        return data.cache("1MiB", path=tmp_path / "c", version="1").batch(40).workers(2, kind=kind)

    first = build()
    expected = [batch.tolist() for batch in first]
    shutil.rmtree(tmp_path / "c")
    assert [batch.tolist() for batch in first] == expected
    second = build()
    for _ in range(2):
        assert [batch.tolist() for batch in second] == expected
    assert counted(second).hits == counted(second).items == 40
    assert [batch.tolist() for batch in first] == expected
