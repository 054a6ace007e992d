"""What another package registers is found by name: kinds of workers, and caches over nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE = """
    from stoker.cache.example_cache import ExampleCache
    from stoker.engine.workers.threads import WorkerPool

    def check(options):
        if options:
            raise ValueError(f"other workers take no options, not {options}")

    def make_pool(workers, plan, host, autotuner, kept):
        print("pool of", workers.count)
        return WorkerPool(workers.count, max(1, len(host)), autotuner)

    def of_chain(limit, *, cluster, insecure, source, operations, version, **settings):
        print("cache over", cluster)
        return ExampleCache(limit, identity=version, examples=len(source), **settings)
"""
ENTRY_POINTS = """
    [stoker.workers]
    other = other_rooms
    broken = other_rooms_that_are_gone
    [stoker.caches]
    other = other_rooms
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder in which a package that registers something is installed."""
    (tmp_path / "other_rooms.py").write_text(textwrap.dedent(PACKAGE))
    metadata = tmp_path / "other_rooms-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-rooms\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    return tmp_path


def run(folder: Path, script: str) -> str:
    """Run a script beside the package; return what it prints."""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import stoker\n" + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_workers_of_another_package_make_the_stream(installed: Path) -> None:
    said = run(
        installed,
        """
        p = stoker.from_dataset(list(range(40)), seed=0).shuffle().map(lambda x: x + 1).batch(8)
        here = [batch.tolist() for batch in p.workers(0)]
        assert [batch.tolist() for batch in p.workers(2, kind="other")] == here
        try:
            p.workers(2, kind="other", ray_options={"num_cpus": 1})
        except ValueError as error:
            print(error)
        try:
            p.workers(2, kind="others")
        except ValueError as error:
            print(error)
        """,
    )
    assert said.splitlines() == [
        "pool of 2",
        "other workers take no options, not {'num_cpus': 1}",
        "kind must be 'thread', 'process', 'broken', 'other' or 'ray', not 'others'",
    ]


def test_a_package_that_cannot_be_imported_says_why(installed: Path) -> None:
    said = run(
        installed,
        """
        try:
            stoker.from_dataset([1, 2]).workers(1, kind="broken")
        except ModuleNotFoundError as error:
            print(error)
        """,
    )
    assert said == "No module named 'other_rooms_that_are_gone'\n"


def test_a_cache_of_another_package_holds_the_examples(installed: Path) -> None:
    said = run(
        installed,
        """
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
        """,
    )
    assert said == "cache over other\n"
