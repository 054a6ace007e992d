"""`stoker doctor`, in processes of its own with the limits and packages that it reports."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from bare_environment import make_bare_environment

MAIN = "from stoker.cli import main; main()"


def report(
    *python: str, before: tuple[str, ...] = (), **variables: str
) -> dict[str, tuple[str, str]]:
    """Run the command; return what each line of its report says, and what it advises."""
    done = subprocess.run(
        [*before, sys.executable, "-W", "error", *python, "-c", MAIN, "doctor"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        if " -> " in line and (not line[2:].split("->")[0].strip()):
            found[name] = (found[name][0], line.split("-> ", 1)[1])
        else:
            name, text = re.split(r"  +", line[2:], maxsplit=1)
            found[name] = (text, "")
            assert line[:2] in ("  ", "! ")
    return found


def test_it_says_what_python_packages_and_limits_there_are() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        found = report(WORLD_SIZE="3")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found["stoker"][0].startswith(stoker.__version__)
    assert found["Python"][0].startswith(sys.version.split()[0])
    assert f"numpy {importlib.metadata.version('numpy')}" in found["packages"][0]
    assert found["torch"] == (importlib.metadata.version("torch"), "")
    assert found["ranks"] == ("WORLD_SIZE=3", "")
    assert found["cores"][0].startswith(f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} ")
    text, advice = found["open files"]
    assert text.startswith("at most 200;")
    assert advice == "many workers or shards need more: ulimit -n"


def test_what_is_not_installed_is_named_with_its_use_and_the_extra(tmp_path: Path) -> None:
    """Python sees stoker and what it requires alone, as after `pip install stoker`."""
    make_bare_environment(tmp_path, "stoker")
    source = Path(stoker.__file__).parents[1]
    path = os.pathsep.join([str(source), str(tmp_path)])
    found = report("-S", PYTHONPATH=path, PYTHONWARNINGS="")
    uses = "from_parquet, from_csv, from_table"
    missing = f"not installed; needed for {uses}: pip install pyarrow"
    assert found["pyarrow"] == (missing, "")
    assert found["native path"][0].startswith("not in use")
    assert "PyTorch" not in found["GPU"][0]
    assert f"lmdb {importlib.metadata.version('lmdb')}" in found["packages"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("size_mib", "free_mib", "advice"),
    [(64, 64, "docker run --shm-size=64g"), (128, 1, "make room for caches and feeds")],
)
def test_little_shared_memory_is_named_with_the_cure(
    size_mib: int, free_mib: int, advice: str
) -> None:
    """In a mount namespace of its own, as a container has."""
    mount = (
        f"mount -t tmpfs -o size={size_mib}m tmpfs /dev/shm && "
        f'head -c {size_mib - free_mib}M /dev/zero > /dev/shm/x && "$@"'
    )
    found = report(before=("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"))
    text, told = found["shared memory"]
    assert text == f"{free_mib}.0 MiB of {size_mib}.0 MiB free in /dev/shm"
    assert advice in told
