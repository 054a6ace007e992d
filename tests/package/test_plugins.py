"""What another package registers is found by name: workers, caches, commands, names of stoker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import stoker
from command_line import Called, python

PACKAGE = """
    from pathlib import Path
    from typing import Annotated, Optional

    from stoker.cache.example_cache import ExampleCache
    from stoker.cli import Argument
    from stoker.engine.workers.threads import WorkerPool

    def check(options):
        if options:
            raise ValueError(f"other workers take no options, not {options}")

    def make_pool(workers, host, autotuner, kept):
        print("pool of", workers.count)
        return WorkerPool(workers.count, max(1, len(host)), autotuner)

    def of_chain(limit, *, cluster, insecure, source, operations, version, **settings):
        print("cache over", cluster)
        return ExampleCache(limit, identity=version, examples=len(source), **settings)

    def hello(name: str, *, loud: bool = False) -> None:
        '''Greet somebody.

        In as many words as it takes.
        '''
        print(f"hello {name}{'!' * loud}")

    def start(
        script: list[str],
        *,
        json: Optional[Path] = None,
        tag: list[str] | None = None,
        share: Annotated[float, Argument("At 100% all.", metavar="PART", least=0.5)] = 1.0,
        loud: bool = False,
    ) -> None:
        '''Start a script.'''
        print(script, json, tag, share, loud)

    def first() -> None:
        '''The first of its group.'''
        print("one")

    def stop() -> None:
        raise KeyboardInterrupt

    def from_nothing():
        return "a name of stoker's"
"""
ENTRY_POINTS = """
    [stoker.workers]
    other = other_rooms
    broken = other_rooms_that_are_gone
    [stoker.caches]
    other = other_rooms
    [stoker.commands]
    analyze = other_rooms:hello
    cache.hello = other_rooms:hello
    gone = other_rooms_that_are_gone:hello
    hello = other_rooms:hello
    lists.first = other_rooms:first
    odd = other_rooms:__name__
    start = other_rooms:start
    stop = other_rooms:stop
    torn = other_rooms_torn:hello
    [stoker.names]
    from_nothing = other_rooms:from_nothing
    from_the_gone = other_rooms_that_are_gone:hello
    feed = other_rooms:from_nothing
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a package that registers something is installed."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "other_rooms.py").write_text(textwrap.dedent(PACKAGE))
    (folder / "other_rooms_torn.py").write_text("raise ValueError('torn in two')\n")
    register(folder, "other-rooms", ENTRY_POINTS)
    return folder


def register(folder: Path, name: str, entry_points: str) -> None:
    """Install a package's metadata."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(textwrap.dedent(entry_points))


CALLS = """
import contextlib, io, json, sys
from stoker.cli import main

for line in sys.argv[1:]:
    out, errors, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["stoker", *line.split()]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), errors.getvalue()]))
"""


def call(folder: Path, *lines: str) -> list[Called]:
    """Call ``stoker`` beside the package, with each of these command lines."""
    done = python(
        "-W", "error", "-c", CALLS, *lines, PYTHONPATH=str(folder), COLUMNS="200", NO_COLOR="1"
    )
    assert done.returncode == 0, done.stderr
    return [Called(*json.loads(line)) for line in done.stdout.splitlines()]


def test_workers_caches_and_names_of_another_package_are_found(installed: Path) -> None:
    script = """
        import stoker

        p = stoker.from_dataset(list(range(40)), seed=0).shuffle().map(lambda x: x + 1).batch(8)
        here = [batch.tolist() for batch in p.workers(0)]
        assert [batch.tolist() for batch in p.workers(2, kind="other")] == here
        try:
            p.workers(2, kind="other", ray_options={"num_cpus": 1})
        except ValueError as error:
            print(error)
        for kind in ("others", "broken"):
            try:
                p.workers(2, kind=kind)
            except (ValueError, ImportError) as error:
                print(error)

        class Read:
            times = 0
            def __len__(self):
                return 8
            def __getitem__(self, index):
                Read.times += 1
                return index

        p = stoker.from_dataset(Read()).cache("8MiB", cluster="other", version="1").workers(0)
        first = list(p)
        read = Read.times
        assert list(p) == first == list(range(8)) and Read.times == read

        print(stoker.feed.__module__, stoker.from_nothing(), sep=", ")
        print("from_feed" in dir(stoker), hasattr(stoker, "from_elsewhere"))
        try:
            stoker.from_the_gone
        except ImportError as error:
            print(error)
    """
    found = python("-W", "error", "-c", textwrap.dedent(script), PYTHONPATH=str(installed))
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "pool of 2",
        "other workers take no options, not {'num_cpus': 1}",
        "kind must be 'thread', 'process', 'broken', 'other' or 'ray', not 'others'",
        "other-rooms 1.0, which registers 'broken' in stoker.workers, cannot be imported: "
        "ModuleNotFoundError: No module named 'other_rooms_that_are_gone'",
        "cache over other",
        "stoker.feeds.api, a name of stoker's",
        "True False",
        "other-rooms 1.0, which registers 'from_the_gone' in stoker.names, cannot be imported: "
        "ModuleNotFoundError: No module named 'other_rooms_that_are_gone'",
    ]


def test_commands_of_other_packages_run_and_are_listed_and_broken_ones_stop_no_other(
    installed: Path,
) -> None:
    all_of_them, of_analyze, of_cache, of_hello, *done = call(
        installed,
        *("--help", "analyze --help", "cache --help", "hello --help", "hello world --loud"),
        *("cache hello cache", "lists first", "cache list", "gone whatever --more"),
        *("torn whatever --more", "odd"),
    )
    assert done[:3] == [(0, "hello world!\n", ""), (0, "hello cache\n", ""), (0, "one\n", "")]
    own, others = all_of_them.stdout.split("commands of other packages:")
    for command in ("analyze", "cache", "feed", "pack", "what-if"):
        assert re.search(rf"^  {command} ", own, re.MULTILINE), command
    assert re.search(r"^  hello +Greet somebody\.$", others, re.MULTILINE)
    assert re.search(r"^  lists +Commands: first\.$", others, re.MULTILINE)
    assert "hello" in of_cache.stdout
    assert "In as many words as it takes." in of_hello.stdout
    assert "accelerator is idle" in of_analyze.stdout, "a name of stoker's stays its own"
    assert all_of_them.code == 0
    assert "No module named 'other_rooms_that_are_gone'" in all_of_them.stdout
    assert "ValueError: torn in two" in all_of_them.stdout
    listed, gone, torn, odd = done[3:]
    assert listed.code == 0
    for failed, name, why in (
        (gone, "gone", "ModuleNotFoundError: No module named 'other_rooms_that_are_gone'"),
        (torn, "torn", "ValueError: torn in two"),
    ):
        assert failed.code == 1
        assert failed.stderr == (
            f"stoker {name}: other-rooms 1.0, which registers {name!r} in stoker.commands, cannot "
            f"be imported: {why}\n"
        )
    assert odd.code == 1
    assert odd.stderr == "stoker odd: a command is a function, not 'other_rooms'\n"


def test_words_from_the_script_on_are_the_scripts_own(installed: Path) -> None:
    *done, help_text = call(
        installed,
        *("start t.py --json r --loud -h", "start --json=r --loud t.py", "start -m mod --json r"),
        *("start --tag a --tag=b -- -x -- --tag c", "start -- -- -x", "start --share .5 t -- t"),
        "start --loud --help t.py",
    )
    assert [each.stdout.strip() for each in done] == [
        "['t.py', '--json', 'r', '--loud', '-h'] None None 1.0 False",
        "['t.py'] r None 1.0 True",
        "['-m', 'mod', '--json', 'r'] None None 1.0 False",
        "['-x', '--', '--tag', 'c'] None ['a', 'b'] 1.0 False",
        "['--', '-x'] None None 1.0 False",
        "['t', '--', 't'] None None 0.5 False",
    ]
    assert {(each.code, each.stderr) for each in done} == {(0, "")}
    assert help_text.stdout.startswith("usage: stoker start [OPTIONS] TEXT ...\n")
    assert "  --share PART  At 100% all. [default: 1.0; at least 0.5]\n" in help_text.stdout


def test_wrong_words_are_told_of_in_a_line_and_ctrl_c_has_no_traceback(installed: Path) -> None:
    wrong = {
        "start": "the following arguments are required: TEXT",
        "start --json": "argument --json: expected one argument",
        "start --share nan t.py": "argument --share: nan is not at least 0.5",
        "start --share x t.py": "argument --share: invalid float value: 'x'",
        "hello you --lout": "there is no option --lout: did you mean --loud?",
        "hello you --lo": "there is no option --lo: did you mean --loud or --help?",
        "hello you too": "there is no argument too",
        "lists second": "there is no command 'second'",
    }
    *answers, stopped = call(installed, *wrong, "stop")
    assert stopped == (130, "", "")
    for (words, told), found in zip(wrong.items(), answers, strict=True):
        program = f"stoker {words.split()[0]}"
        line = f"{program}: {told} ({program} --help shows all)\n"
        assert found == (2, "", line)


def test_two_packages_that_claim_a_name_are_told_of(tmp_path: Path) -> None:
    for name in ("other-rooms", "more-rooms"):
        register(tmp_path, name, "[stoker.commands]\nhello = other_rooms:hello\n")
    (done,) = call(tmp_path, "hello world")
    assert done.code == 1
    assert "keep one of them" in done.stderr
    assert {"more-rooms 1.0", "other-rooms 1.0"} <= set(re.findall(r"\w+-rooms 1.0", done.stderr))


@pytest.mark.full
def test_the_command_line_runs_as_a_module() -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "stoker", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert run("-h") == run("--help")
    assert "usage: stoker cache list" in run("cache", "list", "-h")
    assert run("--version") == f"stoker {stoker.__version__}\n"
