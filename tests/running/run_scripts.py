"""Training scripts that `stoker run` starts in real processes, and reports with advice."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec

from analysis.reports import PREP, about
from stoker.analysis.model.report import Action, LoaderOptions, write_report

PRELUDE = """
import hashlib, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
torch.set_num_threads(1)
torch.manual_seed(5)


class Rows(Dataset):
    def __init__(self, length=60):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator()
        generator.manual_seed(index)
        return torch.rand(4, generator=generator), float(index % 2)


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))


def train(model, loader, epochs=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = ((model(x).squeeze(1) - y.float()) ** 2).mean()
            loss.backward()
            optimizer.step()
        print(epoch, repr(loss.item()))
"""

COMMAND = ("-m", "stoker", "run")


def write_script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(PRELUDE + "\n\n" + textwrap.dedent(body))
    return path


def write_advice(folder: Path, *codes: str, loader: str = "train.py:1") -> Path:
    """Write a report that advises options of the DataLoader, such as ``num_workers=2``, with a gain
    of 1.5."""
    actions = []
    for code in codes:
        name, _, value = code.partition("=")
        options = msgspec.convert({name: int(value)}, LoaderOptions)
        actions.append(Action(code, f"DataLoader(..., {code})", about(1.5), "", options=options))
    found = msgspec.structs.replace(
        PREP,
        actions=actions,
        cores=2,
        loader=msgspec.structs.replace(PREP.loader, name=loader, batch_size=8),
    )
    path = folder / "report.json"
    write_report(found, path)
    return path


def start(
    folder: Path, *arguments: str | os.PathLike[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [os.fspath(argument) for argument in arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def run(
    folder: Path, *arguments: str | os.PathLike[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``stoker run`` with arguments."""
    return start(folder, sys.executable, *COMMAND, *arguments, **variables)


def run_both(
    folder: Path, *words: str | os.PathLike[str], code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``stoker run``, and what it runs by itself; return how the former ended.

    Both end with a code, and print the same: what was trained on was the same. ``words``: those of
    ``stoker run``, then the script and its own.
    """
    script = next(at for at, word in enumerate(words) if os.fspath(word).endswith(".py"))
    plain = start(folder, sys.executable, *words[script:])
    found = run(folder, *words, **variables)
    assert plain.returncode == found.returncode == code, found.stderr
    assert found.stdout == plain.stdout
    return found
