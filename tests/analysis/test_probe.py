"""The probe changes nothing that a training script can see."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import stoker
from command_line import python
from stoker.analysis.probe import records

HERE = Path(__file__).parent
PROBE = Path(stoker.__file__).parent / "analysis" / "probe"


def variables(folder: Path) -> dict[str, str]:
    """Return what has a program be watched."""
    return {"PYTHONPATH": str(PROBE.parent / "startup"), "STOKER_PROBE": str(folder)}


def start(folder: Path | None) -> subprocess.Popen[str]:
    """Start the program of ``conformance.py``."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if folder is not None:
        environment |= variables(folder)
    return subprocess.Popen(
        [sys.executable, "conformance.py"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE, env=environment,
    )  # fmt: skip


def seen(program: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the program saw."""
    try:
        out, errors = program.communicate(timeout=280)
    finally:
        program.kill()
    assert program.returncode == 0, errors
    found: dict[str, Any] = json.loads(out)
    return found


def recorded_in(folder: Path) -> list[records.Row]:
    """Return the rows of the one process that was watched, without a failure."""
    assert not list(folder.glob("failed-*"))
    (path,) = folder.glob("process-*.rows")
    watched = records.WatchedRows(str(path))
    try:
        return list(watched.rows())
    finally:
        watched.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("probe")
    with start(None) as plain, start(folder) as probed:  # beside each other: they mostly wait
        return seen(plain), seen(probed), folder


@pytest.mark.full
def test_a_script_sees_no_difference(
    both: tuple[dict[str, Any], dict[str, Any], Path],
) -> None:
    plain, probed, _ = both
    assert plain.keys() == probed.keys()
    had, has = Counter(plain.pop("descriptors")), Counter(probed.pop("descriptors"))
    assert not had - has
    assert sum((has - had).values()) <= 1, has - had  # a mapped file has a descriptor
    for name in plain:
        assert probed[name] == plain[name], name
    assert plain["Broken 1"][1][0] == "KeyError"  # it saw something, and went on after it
    assert plain["killed"][1:] == ["RuntimeError"]  # behind a batch
    assert plain["left after break"] == plain["left"]
    assert len(plain["guarded"]) == 3


@pytest.mark.full
def test_the_probe_was_there(both: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    _, _, folder = both
    rows = recorded_in(folder)
    kinds = {row.kind & 15 for row in rows}
    assert {records.BATCH, records.END, records.ERROR, records.STARTED} <= kinds
    assert all(row.entered_ns <= row.left_ns for row in rows)
    assert not list(folder.glob("*.work"))  # workers are looked at in drains alone
    (about,) = folder.glob("process-*.json")
    loaders = json.loads(about.read_text())["loaders"]
    assert {loader["site"].split(":")[0] for loader in loaders} == {"conformance.py"}
    assert "Mapped, batch 3, 0 workers" in {loader["describes"] for loader in loaders}


@pytest.mark.full
def test_a_probe_that_fails_takes_itself_out_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "probe"
    folder.mkdir()
    script = """
import os, torch
from torch.utils.data import DataLoader
os.rmdir(os.environ["STOKER_PROBE"])  # it can write nothing
for _ in range(2):
    print(len(list(DataLoader(list(range(10)), 4, num_workers=2))))
os.mkdir(os.environ["STOKER_PROBE"])
"""
    done = python("-c", script, cwd=tmp_path, **variables(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "3"]
    assert done.stderr == ""


CHANGES = """
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    epoch = 0

    def __init__(self):
        self.known = {}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.known.setdefault(index, self.epoch)


def train(loader, changes, stops=False):
    for epoch in range(3):
        if changes:
            loader.dataset.epoch = epoch
        for batch in loader:
            if stops:
                break


loaders = [DataLoader(Rows(), 4, num_workers=workers) for workers in (0, 0, 1, 1, 0)]
for loader, changes in zip(loaders, (True, False, True, False, True)):
    train(loader, changes, stops=loader is loaders[-1])
"""


@pytest.mark.full
def test_what_a_script_changes_of_its_dataset_between_epochs_is_seen(tmp_path: Path) -> None:
    done = python("-c", CHANGES, cwd=tmp_path, **variables(tmp_path))
    assert done.returncode == 0, done.stderr
    (about,) = tmp_path.glob("process-*.json")
    loaders = json.loads(about.read_text())["loaders"]
    # Without workers the script itself reads; where it leaves an epoch early, nobody can tell.
    assert [loader["changes"] for loader in loaders] == [["epoch"], [], ["epoch"], [], None]


STEPS = """
import logging
import time

import torch
from torch.utils.data import DataLoader


class Wait(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.005)
        return x * 2


class Keep(logging.Handler):
    def emit(self, record):
        time.sleep(0.005)


class Late(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.005)
        return super().step(closure)


class LateBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.005)
        return grad


def train(closes):
    def loss():
        optimizer.zero_grad()
        found = LateBackward.apply(net(batch)).sum()
        found.backward()
        return found

    for batch in loader(range(4)):
        batch.to("meta")
        batch.to(torch.float64)
        if closes:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
        logging.getLogger("train").error("done")


def loader(numbers):
    return DataLoader([float(number) for number in numbers], collate_fn=collate)


def collate(numbers):
    return Wait()(torch.tensor(numbers))  # inside next(), which is waiting


net = torch.nn.Sequential(Wait(), torch.nn.Linear(1, 1))
optimizer = Late(net.parameters(), lr=0.1)
logging.getLogger("train").addHandler(Keep())
for batch in loader(range(4)):
    pass
train(closes=False)
train(closes=True)
"""


def test_the_parts_of_a_step_are_timed_and_what_is_inside_next_is_waiting(tmp_path: Path) -> None:
    done = python("-c", STEPS, cwd=tmp_path, **variables(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = recorded_in(tmp_path)
    read, *trained = ([row for row in rows if row.epoch == epoch] for epoch in range(3))
    assert not any(read[-1].parts_ns)
    for rows in trained:
        first, last = rows[1], rows[-1]  # batches; the end of the epoch
        pairs = zip(first.parts_ns, last.parts_ns, strict=True)
        spent_ns = [after - before for before, after in pairs]
        forward, backward, optimizer, copies, logging = spent_ns
        assert min(forward, backward, optimizer, logging) >= 4 * 5_000_000
        assert copies > 0
        waited_ns = sum(row.left_ns - row.entered_ns for row in rows[1:-1])
        assert sum(spent_ns) <= last.entered_ns - first.entered_ns - waited_ns


def test_the_probe_loads_nothing_but_the_standard_library() -> None:
    for path in PROBE.rglob("*.py"):
        if path.stem != "pipeline_session":  # where the script has imported stoker itself
            assert "import_module" not in path.read_text(), "nor by a name in a text"
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
            for name in names:
                assert name.split(".")[0] in sys.stdlib_module_names, (path.name, name)
