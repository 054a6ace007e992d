"""Feeds of other hosts: exactly once for every job, whoever is killed, frozen or cut off."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import served
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import (
    Play,
    check_outputs,
    feeder_of,
    feeding,
    fresh_name,
    joining,
    log_of,
    play_out,
    plays,
    sharing,
    start,
    wait_for_the_end,
)

import stoker
from authority import certificates
from line import cut_at, flip_at, line_to
from patience import wait_until
from scripts import TIMEOUT_S, reserved_port
from stoker.transport.secret import make_token_file
from strategies import FULL, shortened

HOSTS = ("127.0.0.1", "localhost")


@pytest.fixture(autouse=True, scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("secret") / "token"
    make_token_file(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_TOKEN_FILE", str(path))
        yield path


@dataclasses.dataclass(frozen=True)
class Somewhere:
    """A feed's name and port."""

    name: str
    port: int

    @property
    def listen(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, host: str = HOSTS[0], port: int | None = None) -> str:
        return f"tcp://{host}:{port or self.port}/{self.name}"


@contextlib.contextmanager
def somewhere() -> Iterator[Somewhere]:
    with reserved_port() as port:
        yield Somewhere(fresh_name(), port)


@pytest.fixture
def feed() -> Iterator[Somewhere]:
    with somewhere() as made:
        yield made


# -- what comes out


class Point(NamedTuple):
    grid: Any
    name: str


def nested() -> stoker.Pipeline:
    import torch

    def make(index: int) -> Any:
        grid = np.arange(2000.0).reshape(40, 50) + index
        return {
            "point": Point(grid.T, f"é{index}"),
            "tensor": torch.full((3, 700), index, dtype=torch.bfloat16),
            3: (index, 1.5, None, True, b"x" * 5000, [np.float32(index)]),
            "none": np.zeros((0, 3)),
        }

    return stoker.from_dataset(range(70), seed=0).map(make)


@pytest.mark.parametrize("kind", shortened(("batches", "examples", *served.KINDS[1:4]), 2))
def test_every_kind_of_feed_arrives(kind: str, feed: Somewhere) -> None:
    with feeding(getattr(served, kind), feed.name, listen=feed.listen):
        train = stoker.from_feed(feed.url())
        values = list(train)
        assert [served.digest(value) for value in values] == served.expected(kind, 0)
        assert not values[0][0].flags.writeable
        if kind != "filtered":
            assert len(train) == len(values)


def test_values_arrive_as_they_are(feed: Somewhere) -> None:
    import torch

    with feeding(nested, feed.name, listen=feed.listen):
        for expected, value in zip(nested(), stoker.from_feed(feed.url()), strict=True):
            assert list(value) == list(expected)
            point, tensor = value["point"], value["tensor"]
            assert type(point) is Point
            assert (point.grid == expected["point"].grid).all()
            assert point.grid.flags.f_contiguous
            assert point.name == expected["point"].name
            assert torch.equal(tensor, expected["tensor"])
            tensor.zero_()  # a job's own copy of the page
            assert value[3] == expected[3]
            assert type(value[3][5][0]) is np.float32
            assert value["none"].shape == (0, 3)


def test_several_epochs_are_prepared_once_for_all_hosts(feed: Somewhere, tmp_path: Path) -> None:
    cast = [Play(epochs=2, step_s=0.002 * (number % 2)) for number in range(5)]
    names = [feed.name, feed.url(HOSTS[0]), feed.url(HOSTS[0]), feed.url(HOSTS[1])]
    makes = [joining(name) for name in (*names, names[3])]
    with feeding(served.batches, feed.name, listen=feed.listen):
        play_out(makes, cast, "batches", [])


# -- who is killed, frozen or cut off


@settings(max_examples=100 if FULL else 3)
@given(plays(fewest=2), st.sampled_from(served.KINDS))
def test_jobs_that_are_killed(cast: list[Play], kind: str) -> None:
    make: Callable[[], Any] = getattr(served, kind)
    with somewhere() as feed, feeding(make, feed.name, listen=feed.listen):
        names = [feed.url(HOSTS[0]), feed.url(HOSTS[1]), feed.name]
        play_out([joining(names[number % 3]) for number in range(len(cast))], cast, kind, [])


@pytest.mark.full
@settings(max_examples=100 if FULL else 2)
@given(
    plays(fewest=2),
    st.sampled_from(served.KINDS),
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
def test_a_feeder_that_is_killed_goes_on_for_jobs_elsewhere(
    cast: list[Play], kind: str, kills: list[int]
) -> None:
    """As long as there is a job beside it that starts it again."""
    stays = Play(epochs=3, step_s=0.01)
    with somewhere() as feed, tempfile.TemporaryDirectory() as home:
        share = sharing(kind, feed.name, timeout_s=2.0, listen=feed.listen)
        whom = [(behind, feed.name) for behind in kills]
        first = start(share, Play(epochs=10_000, step_s=0.02), Path(home) / "first")
        try:
            wait_until(lambda: feeder_of(feed.name))
            makes = [share, *(joining(feed.url(HOSTS[n % 2])) for n in range(len(cast)))]
            play_out(makes, [stays, *cast], kind, whom)
        finally:
            first.kill()
            first.join()


@settings(max_examples=100 if FULL else 3)
@given(
    st.sampled_from(("batches", "examples")),
    st.lists(
        st.builds(
            lambda make, place: make(place),
            st.sampled_from((cut_at, flip_at)),
            st.integers(0, 400_000),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_lines_that_are_cut_and_bytes_that_change(kind: str, damages: list[Any]) -> None:
    make: Callable[[], Any] = getattr(served, kind)
    with (
        somewhere() as feed,
        feeding(make, feed.name, listen=feed.listen),
        line_to(feed.port, damages) as line,
    ):
        train = stoker.from_feed(feed.url(port=line.port))
        for epoch in range(2):
            assert [served.digest(value) for value in train] == served.expected(kind, epoch)


@pytest.mark.full
def test_a_frozen_job_holds_up_nobody_for_long(feed: Somewhere, tmp_path: Path) -> None:
    frozen, others = Play(epochs=4, step_s=0.01), Play(epochs=4, step_s=0.01)
    logs = [tmp_path / "frozen", tmp_path / "others"]
    with feeding(served.batches, feed.name, listen=feed.listen, timeout_s=3.0, jobs=2):
        jobs = [
            start(joining(feed.url()), frozen, logs[0]),
            start(joining(feed.name), others, logs[1]),
        ]
        wait_until(lambda: len(log_of(logs[0]).outputs) > 5)
        os.kill(jobs[0].pid, signal.SIGSTOP)
        wait_until(lambda: log_of(logs[1]).ended)
        wait_for_the_end(jobs)
    for play, log in zip((frozen, others), logs, strict=True):
        check_outputs(log_of(log), "batches", play)


# -- what is refused


@pytest.mark.full
def test_the_end_of_the_feeder_is_told(feed: Somewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    with feeding(served.batches, feed.name, listen=feed.listen) as feeder:
        batches = iter(stoker.from_feed(feed.url()))
        kept = next(batches)
        digest = served.digest(kept)
        feeder.kill()
        with pytest.raises(stoker.FeedError, match=r"there is no feed tcp://.*--listen"):
            for _ in batches:
                pass
        assert served.digest(kept) == digest


@pytest.mark.full
def test_feeds_that_are_not_there(feed: Somewhere) -> None:
    with pytest.raises(stoker.FeedError, match="there is no feed tcp://"):
        stoker.from_feed(feed.url())
    with feeding(served.batches, feed.name, listen=feed.listen):
        wait_until(lambda: feeder_of(feed.name))
        with pytest.raises(stoker.FeedError, match=r"no feed 'other'"):
            stoker.from_feed(dataclasses.replace(feed, name="other").url())


@pytest.mark.parametrize(
    "url", ["tcp://host/name", "tcp://host:1/", "tcp://host:99999/x", "tcp://:1/x", "tcp://h:1/a/b"]
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port/NAME"):
        stoker.from_feed(url)


def test_without_the_token_nobody_joins(
    feed: Somewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with feeding(served.batches, feed.name, listen=feed.listen):
        wait_until(lambda: feeder_of(feed.name))
        monkeypatch.setenv("STOKER_TOKEN_FILE", str(tmp_path / "none"))
        with pytest.raises(stoker.errors.TokenError, match="cannot read the token"):
            stoker.from_feed(feed.url())
        monkeypatch.setenv("STOKER_TOKEN_FILE", str(tmp_path / "other"))
        make_token_file(tmp_path / "other")
        with pytest.raises(stoker.FeedError, match="another token"):
            stoker.from_feed(feed.url())


def test_an_encrypted_feed(
    feed: Somewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs need certificates as the feeder has them, and are told so."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        certificates(tmp_path / name)
    monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path / "ours"))
    with feeding(served.batches, feed.name, listen=feed.listen):
        wait_until(lambda: feeder_of(feed.name))
        found = [served.digest(batch) for batch in stoker.from_feed(feed.url())]
        assert found == served.expected("batches", 0)
        monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path / "theirs"))
        with pytest.raises(stoker.FeedError, match="authority did not sign its certificate"):
            stoker.from_feed(feed.url())
        monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path / "nowhere"))
        with pytest.raises(stoker.errors.TokenError, match="no such folder"):
            stoker.from_feed(feed.url())
        monkeypatch.delenv("STOKER_TLS_FOLDER")
        with pytest.raises(stoker.FeedError, match="encrypts connections with"):
            stoker.from_feed(feed.url())


def test_a_trusted_network_is_one_for_the_feed_and_its_jobs(feed: Somewhere) -> None:
    with feeding(served.batches, feed.name, listen=feed.listen, insecure=True):
        wait_until(lambda: feeder_of(feed.name))
        train = stoker.from_feed(feed.url(), insecure=True)
        assert [served.digest(batch) for batch in train] == served.expected("batches", 0)
        with pytest.raises(stoker.FeedError, match=r"does not encrypt .*insecure=True here"):
            stoker.from_feed(feed.url())


def sets() -> stoker.Pipeline:
    return stoker.from_dataset(range(5), seed=0).map(lambda index: {"a": {index}})


def test_what_cannot_go_to_other_hosts_says_so(feed: Somewhere) -> None:
    with feeding(sets, feed.name, listen=feed.listen):
        assert len(list(stoker.from_feed(feed.name))) == 5
        with pytest.raises(stoker.StokerError, match=r"serve other hosts: .*set \(at 0\.a\)"):
            list(stoker.from_feed(feed.url()))


def test_addresses_that_are_taken(feed: Somewhere) -> None:
    target = f"{Path(served.__file__)}:batches"
    taken = socket.create_server(("127.0.0.1", feed.port))
    with taken, pytest.raises(stoker.FeedError, match="cannot listen on"):
        stoker.feed(target, name=feed.name, listen=feed.listen)
    with pytest.raises(ValueError, match="host:port"):
        stoker.feed(target, name=feed.name, listen="nowhere")


@pytest.mark.full
def test_the_command_says_where_it_listens(feed: Somewhere) -> None:
    command = [sys.executable, "-W", "error", "-c", "from stoker.cli import main; main()"]
    what = ["feed", f"{served.__file__}:batches", "--name", feed.name, "--listen", feed.listen]
    with subprocess.Popen(
        [*command, *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as feeder:
        wait_until(lambda: feeder_of(feed.name))
        assert len(list(stoker.from_feed(feed.url()))) == 19
        feeder.send_signal(signal.SIGINT)
        said, _ = feeder.communicate(timeout=TIMEOUT_S)
    assert f'stoker.from_feed("{feed.url()}")' in said.replace("'", '"')
