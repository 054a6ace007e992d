"""Numbers for trackers: what they say, who takes them; the server of a page and of Prometheus."""

from __future__ import annotations

import gc
import html
import json
import os
import re
import socket
import threading
import urllib.error
import urllib.request
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import stoker
from strategies import Examples

ROOT = Path(__file__).parents[2]
ROW_BYTES = 3 * 4


def rows(count: int = 20) -> stoker.Pipeline:
    return stoker.from_arrays(np.zeros((count, 3), np.float32), seed=0).shuffle()


def run(pipeline: Any, epochs: int = 1) -> Any:
    for _ in range(epochs):
        for _ in pipeline:
            pass
    return pipeline


def cached() -> stoker.Pipeline:
    return stoker.from_dataset(Examples(20), seed=0).cache("2MiB", version="1").batch(4)


# -- what they say


def test_numbers_agree_with_the_statistics_and_count_over_epochs() -> None:
    train = run(rows().echo(2, pool=8).batch(4), epochs=3)
    stats, found = train.stats(), train.metrics()
    assert all(type(value) is float and np.isfinite(value) for value in found.values())
    assert found["stoker/epoch"] == stats.epoch == 2
    assert found["stoker/wait_fraction"] == stats.wait_fraction
    assert found["stoker/realised_factor"] == stats.realised_factor == 2
    assert found["stoker/copy_distance"] == stats.copy_distance > 0
    assert found["stoker/fresh_examples_total"] == 3 * 20
    assert found["stoker/uses_total"] == 3 * 40
    assert found["stoker/steps_total"] == 3 * 10
    assert found["stoker/read_bytes_total"] == 3 * 20 * ROW_BYTES
    assert found["stoker/elapsed_s_total"] == stats.totals.elapsed_s > stats.elapsed_s
    waited_s = stats.totals.consumer_wait_s
    assert found["stoker/consumer_wait_s_total"] == waited_s > stats.consumer_wait_s
    assert set(train.metrics("val/")) == {n.replace("stoker/", "val/") for n in found}
    assert not [name for name in found if re.search("cache|feed", name)], "what does not apply"
    assert rows().batch(4).metrics()["stoker/steps_total"] == 0


@pytest.mark.parametrize(
    ("kind", "workers"), [("thread", 0), ("thread", 2), ("process", 1)], ids=str
)
def test_bytes_are_counted_wherever_they_are_read(kind: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(8):
        (tmp_path / "a" / f"{number}.png").write_bytes(b"x" * (100 + number))
    chain = stoker.from_folder(tmp_path, seed=0).map(len, on="image").cache("2MiB", version="1")
    train = run(chain.batch(3).workers(workers, kind=kind))
    assert train.stats().read_bytes == sum(range(100, 108))
    run(train)
    found = train.metrics()
    assert train.stats().read_bytes == 0  # the cache has them
    assert found["stoker/read_bytes_total"] == sum(range(100, 108))
    assert found["stoker/cache_hit_fraction"] == 1
    assert (found["stoker/cache_hits_total"], found["stoker/cache_misses_total"]) == (8, 8)


def test_bytes_of_streams_loaders_and_nested_examples() -> None:
    nested = {"x": np.zeros(4, np.int16), "y": (b"abc", "de", 7, None)}
    stream = run(stoker.from_iterable(lambda: iter([nested] * 5), seed=0).batch(2))
    assert stream.stats().read_bytes == 5 * (8 + 3 + 2)
    assert run(stoker.echo([np.zeros((4, 2))] * 3, 2)).stats().read_bytes == 3 * 4 * 2 * 8
    labelled = stoker.from_arrays(np.zeros((20, 3), np.float32), np.arange(20), seed=0)
    for chain in (labelled, labelled.map(lambda row: row)):  # gathered, and one by one
        assert run(chain.batch(4)).stats().read_bytes == 20 * (ROW_BYTES + 8)


def test_an_epoch_that_is_left_early_counts_once() -> None:
    train = rows().batch(4).workers(0)
    for _ in range(2):
        with iter(train) as batches:
            next(batches)
    found = train.metrics()
    assert found["stoker/steps_total"] == 2
    with iter(train):
        pass  # nothing was asked for: as if it had not been
    assert train.metrics() == found


# -- trackers


def test_tensorboard_takes_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    train = rows().batch(4)
    writer = SummaryWriter(str(tmp_path))
    for step, _ in enumerate(train):
        for name, value in train.metrics().items():
            writer.add_scalar(name, value, step)
    writer.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(train.metrics())
    totals = [event.value for event in read.Scalars("stoker/fresh_examples_total")]
    assert totals == [4, 8, 12, 16, 20]


# -- Prometheus


def asked(url: str, path: str = "metrics") -> str:
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        kind = "text/plain; version=0.0.4" if path else "text/html"
        assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
        return str(answer.read().decode())


def test_prometheus_reads_what_the_endpoint_serves() -> None:
    train, val = run(rows().batch(4)), run(cached())
    with stoker.serve({'a "b\\': train, "val": val}, port=0) as server:
        text = asked(server.url)
    found = {
        (sample.name, sample.labels["pipeline"]): (family.type, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for label, source in (('a "b\\', train), ("val", val)):
        for name, value in source.metrics("stoker_").items():
            kind = "counter" if name.endswith("_total") else "gauge"
            assert found.pop((name, label)) == (kind, value)
    assert not found
    assert all(family.documentation for family in text_string_to_metric_families(text))


def test_the_page_shows_the_statistics_and_the_numbers() -> None:
    train = run(rows().map(lambda row: row).batch(4))
    loader = run(stoker.monitor([1, 2, 3]))
    with stoker.serve({"<train>": train, "loader": loader}, port=0) as server:
        page = asked(server.url, "")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(server.url, "favicon.ico")
    assert "<h1>&lt;train&gt;</h1>" in page
    assert "map(&lt;lambda&gt;)" in page
    assert "<td>fresh_examples_total</td><td>20</td>" in page
    assert "for 3 batches" in page
    assert loader.total.verdict in html.unescape(page)


def test_the_endpoint_is_there_while_the_loop_runs_and_ends_with_close() -> None:
    train = rows(400).map(lambda row: row).echo(2, pool=16).batch(4)
    server = stoker.serve(train, port=0)
    for step, _ in enumerate(train):
        if step % 50 == 0:
            assert f'stoker_steps_total{{pipeline="train"}} {float(step + 1)}' in asked(server.url)
    with pytest.raises(OSError, match="in use"):
        stoker.serve(train, server.port)
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        asked(server.url)


def test_what_asks_for_nothing_good_is_answered_and_does_no_harm() -> None:
    with stoker.serve(rows().batch(4), port=0) as server:
        address = "127.0.0.1", server.port
        for said, status in (
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"501"),
            (b"\x00\xff\r\n\r\n", b"400"),
            (b"GET /metrics HTTP/1.1\r\n" + b"x" * 70_000 + b"\r\n\r\n", b"431"),
        ):
            with socket.create_connection(address, timeout=60) as asking:
                asking.sendall(said)
                answer = b"".join(iter(lambda: asking.recv(4096), b""))
                assert status in answer
        socket.create_connection(address, timeout=60).close()
        assert "stoker_epoch" in asked(server.url)


@pytest.mark.full
def test_who_says_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does who says a little, and who does not take the answer; however many there are."""
    monkeypatch.setattr("stoker.adapters.metrics_server._Handler.timeout", 3600.0)
    with stoker.serve(rows().batch(4), port=0) as server:
        address = "127.0.0.1", server.port
        silent = [socket.create_connection(address, timeout=60) for _ in range(4)]
        silent[1].sendall(b"GET /metr")
        silent[2].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        for _ in range(3):
            assert "stoker_epoch" in asked(server.url)
        silent[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # it is not that they were closed
            silent[0].recv(1)
        silent += [socket.create_connection(address, timeout=60) for _ in range(80)]
        assert "stoker_epoch" in asked(server.url)
        for each in silent:
            each.close()


def test_who_says_nothing_is_closed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stoker.adapters.metrics_server._Handler.timeout", 0.01)
    with (
        stoker.serve(rows().batch(4), port=0) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as silent,
    ):
        assert silent.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_a_source_that_fails_is_told_and_asked_again() -> None:
    class Breaks(stoker.Pipeline):
        works = True

        def stats(self) -> Any:
            if not self.works:
                raise RuntimeError("not now")
            return super().stats()

    train = Breaks(rows().batch(4).chain)
    with stoker.serve(train, port=0) as server:
        train.works = False
        with pytest.raises(urllib.error.HTTPError, match="500") as raised:
            asked(server.url)
        assert "not now" in raised.value.read().decode()
        raised.value.close()
        train.works = True
        assert "stoker_epoch" in asked(server.url)


def test_a_forked_child_leaves_the_endpoint_alone() -> None:
    with stoker.serve(rows().batch(4), port=0) as server:
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert "stoker_epoch" in asked(server.url)
        assert "stoker-metrics" in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("sources", "port", "what"),
    [
        ({"a": [1]}, 0, "stoker.monitor"),
        ({1: rows()}, 0, "a name is text"),
        (rows(), -1, "65535"),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_endpoint(sources: Any, port: Any, what: str) -> None:
    with pytest.raises((TypeError, ValueError), match=what):
        stoker.serve(sources, port)


def test_the_board_names_numbers_that_exist() -> None:
    text = (ROOT / "examples" / "grafana.json").read_text()
    board = json.loads(text)
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = set(re.findall(r"\bstoker_\w+", " ".join([*shown, text.partition('"panels"')[0]])))
    exist = {*run(cached()).metrics("stoker_"), "stoker_feed_lag_outputs"}
    assert len(named) >= 8
    assert named <= exist


def test_an_endpoint_that_is_closed_keeps_no_pipeline() -> None:
    val = run(cached())
    with stoker.serve({"val": val}, port=0) as server:
        asked(server.url)
    gone = weakref.ref(val)
    gc.disable()
    try:
        del val
        assert gone() is None
    finally:
        gc.enable()
