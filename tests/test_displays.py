"""What is drawn on a terminal of 80 columns: help, statistics, live views."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import stoker
from stoker.cli import app
from strategies import Examples

COMMANDS = [
    [],
    ["analyze"],
    ["what-if"],
    ["feed"],
    ["cache"],
    ["cache", "list"],
    ["cache", "info"],
    ["cache", "remove"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_flows_in_80_columns(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    text = [line.rstrip() for line in lines[: lines.index(next(x for x in lines if "─" in x))]]
    for line, following in itertools.pairwise(text):
        if line and following:  # within a paragraph each line takes what fits
            assert len(f"{line} {following.split()[0]}") > 78, (line, following)


class LongNames(Examples):
    """A dataset with a name of some length, as datasets have."""


def test_statistics_fit_a_width_and_keep_the_bottleneck() -> None:
    def augment_and_convert_to_channels_first(x: Any) -> Any:
        return x

    source = stoker.from_dataset(LongNames(40), seed=0).filter(lambda e: True)
    chain = source.cache("2MiB", version="1").map(augment_and_convert_to_channels_first)
    pipeline = chain.batch(4).echo(2, pool=4).workers(0)
    assert len(list(pipeline)) == 20
    stats = pipeline.stats()
    assert stats.bottleneck not in (None, "consumer")
    whole = str(stats)
    assert max(map(len, whole.splitlines())) > 80
    assert repr(stats) == whole  # what a notebook shows
    assert repr(stats.cache) == str(stats.cache)
    for width in (60, 80, 100, 200):
        lines = stats.as_text(width).splitlines()
        assert max(map(len, lines)) <= width
        (slowest,) = (line for line in lines if line.endswith("<- bottleneck"))
        assert slowest.lstrip()[:4] == (stats.bottleneck or "")[:4]
        assert "█" in slowest
        assert sum(stage.name[:4] in line for stage in stats.stages for line in lines) >= 5
    assert stats.as_text(200).split() == whole.split()


def test_statistics_as_a_dict_go_into_json_with_what_is_derived() -> None:
    chain = stoker.from_dataset(Examples(20), seed=0, on_error=2).map(fails_on_3)
    pipeline = chain.cache("2MiB", version="1").batch(4).echo(2).workers(0)
    for _ in pipeline:
        pass
    for stats in (pipeline.stats(), stoker.from_arrays(np.zeros(4)).stats()):
        found = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
        for name in ("realised_factor", "wait_fraction", "pool_bytes", "bottleneck", "uses"):
            assert found[name] == getattr(stats, name)
        assert len(found["stages"]) == len(stats.stages)
        for each, stage in zip(found["stages"], stats.stages, strict=True):
            assert each["rate"] == (stage.rate if stage.seconds else None)
        assert [each["cause"] for each in found["skips"]] == [skip.cause for skip in stats.skips]
        if stats.cache is not None:
            assert found["cache"]["hit_fraction"] == stats.cache.hit_fraction


def fails_on_3(example: Any) -> Any:
    if example["id"] == 3:
        raise ValueError("three")
    return example


# -- in a terminal

LIVE = """
import sys
import numpy as np
import stoker


class Images:
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return np.full(2000, index, np.float64)


train = stoker.from_dataset(Images(), seed=0).cache("64MiB", version="1").batch(10)
with stoker.live(train):
    for number, batch in enumerate(train):
        if number % 10 == 0:
            print("step", number)
            print("said", number, file=sys.stderr)
"""


def on_a_terminal(command: list[str], stop: bytes | None = None) -> str:
    """Return what a program writes to a terminal of 80 columns.

    Args:
        stop: what it is interrupted behind; it runs to its end without.
    """
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
    written = b""
    try:
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                break
            if not read:
                break
            written += read
            if stop is not None and stop in written:
                stop = None
                running.send_signal(2)
        running.wait(60)
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    return written.decode()


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def test_a_live_view_has_the_terminal_for_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIVE)
    written = on_a_terminal([sys.executable, str(tmp_path / "train.py")])
    assert not re.search(r"cache: .* items", written)  # progress in the midst of the picture
    plain = ESCAPE.sub("", written).replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.split("\n")]
    for number in (0, 10, 20):
        assert f"step {number}" in lines
        assert f"said {number}" in lines
    assert "[K" not in plain
    assert any("epoch 0: 30 batches" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_what_is_no_terminal_gets_the_last_picture_whole(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIVE)
    command = [sys.executable, "-W", "error", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "said 0\nsaid 10\nsaid 20\n")
    assert done.stdout.startswith("step 0\nstep 10\nstep 20\nepoch 0: 30 batches, 300 uses")
    assert "0 B not read from storage\n" in done.stdout  # of a line that is longer than 80


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
def test_the_view_of_a_feed_has_the_terminal_for_itself(tmp_path: Path) -> None:
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
    assert "cache:" not in written
    plain = ESCAPE.sub("", written)
    assert "[K" not in plain
    assert "job_with_a_n" in plain
    for column in ("epoch", "behind", "examples/s", "holds up"):
        assert column in plain
    assert plain.rstrip().endswith("stopped")
