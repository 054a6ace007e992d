"""What is drawn on a terminal of 80 columns: help, and the table of a feed."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from command_line import call

COMMANDS = ["", "analyze", "what-if", "feed", "cache", "cache list", "cache remove"]
TEACHES = {
    "analyze": ["torchrun", "train.py", "--loader", "--html", "no root"],
    "what-if": ["stoker what-if report.json --cache 200GiB --cores 16"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_flows_in_80_columns(command: str) -> None:
    result = call(*command.split(), "--help")
    assert result.code == 0
    assert [words for words in TEACHES.get(command, []) if words not in result.stdout] == []
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = lines[: lines.index(next(line for line in lines if line.endswith("s:")))]
    for line, following in itertools.pairwise(text):
        if line and following:  # within a paragraph each line takes what fits
            assert len(f"{line} {following.split()[0]}") > 78, (line, following)


def on_a_terminal(command: list[str], stop: bytes) -> str:
    """Return what a program writes to a terminal of 80 columns; interrupt it behind ``stop``."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    running = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    written, is_stopped = b"", False
    try:
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                break
            if not read:
                break
            written += read
            if not is_stopped and stop in written:
                is_stopped = True
                running.send_signal(2)
        running.wait(500)
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    return written.decode()


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


FEED = """
import numpy as np
import stoker


class Images:
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return np.full(2000, index, np.float64)


def make():
    print("made")
    return stoker.from_dataset(Images(), seed=0).cache("64MiB", version="1").batch(10)
"""

JOB = """
import sys
import stoker

feed = None
while feed is None:
    try:
        feed = stoker.from_feed({name!r})
    except stoker.FeedError:
        pass
while True:
    for batch in feed:
        pass
"""


@pytest.mark.full
def test_the_view_of_a_feed_shows_its_jobs(tmp_path: Path) -> None:
    name = f"displays-{os.getpid()}"
    (tmp_path / "prep.py").write_text(FEED)
    (tmp_path / "job_with_a_name.py").write_text(JOB.format(name=name))
    job = subprocess.Popen(
        [sys.executable, "job_with_a_name.py", "--sizes=[/2]"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        stoker_ = [sys.executable, "-c", "from stoker.cli import main; main()"]
        serving = [*stoker_, "feed", f"{tmp_path}/prep.py:make", "--name", name]
        written = on_a_terminal(serving, stop=b"job_with_a_n")
    finally:
        job.kill()
        job.wait()
    plain = ESCAPE.sub("", written)
    assert "job_with_a_n" in plain
    for column in ("epoch", "behind", "examples/s", "holds up"):
        assert column in plain
    assert plain.rstrip().endswith("stopped")
