"""`stoker.watch` and `stoker run --watch`: real loaders, workers and requests."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import stoker
from running.run_scripts import PRELUDE, run, start, write_advice, write_script
from stoker.analysis.watching import watch as watching
from stoker.analysis.watching.watch import RunWatch
from stoker.cli import app

torch = pytest.importorskip("torch")


@pytest.fixture
def watch() -> Iterator[RunWatch]:
    found = stoker.watch()
    yield found
    found.close()


def make_loader(length: int = 40, **settings: Any) -> Any:
    return torch.utils.data.DataLoader(list(range(length)), 4, **settings)


def test_a_watched_loader_gives_the_same_batches_and_they_are_counted(watch: RunWatch) -> None:
    plain = [[4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3] for at in range(10)]

    class OfItsOwn(torch.utils.data.DataLoader):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            yield from self._get_iterator()

    for kind in (torch.utils.data.DataLoader, OfItsOwn):
        assert [batch.tolist() for batch in kind(list(range(40)), 4)] == plain
    found = watch.stats()
    assert found.batches == 20
    assert found.compute_fraction + found.stall_fraction == pytest.approx(1.0)
    assert 0 < found.wait_p50_s <= found.wait_p95_s <= found.wait_p99_s < found.elapsed_s
    assert (found.rank, found.warnings) == (0, [])
    assert re.search(r"20 batches: compute [\d.]+%, .*stall .*; waits p50", str(found))


def test_time_in_next_is_stall_and_all_else_is_not(watch: RunWatch) -> None:
    class Waits(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            time.sleep(0.002)
            return index

    slept_s = 0.0
    for _ in torch.utils.data.DataLoader(Waits(), 4):
        began_s = time.perf_counter()
        time.sleep(0.002)
        slept_s += time.perf_counter() - began_s
    found = watch.stats()
    assert found.stall_fraction * found.elapsed_s >= 8 * 0.002
    assert found.compute_fraction * found.elapsed_s >= slept_s


def test_errors_pass_through_and_loaders_inside_of_loaders_count_once(watch: RunWatch) -> None:
    class Nested(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index == 7:
                raise KeyError("seven")
            return len(list(make_loader(8)))

    iterator = iter(torch.utils.data.DataLoader(Nested(), 4))
    assert next(iterator).tolist() == [2, 2, 2, 2]
    with pytest.raises(KeyError, match="seven"):
        next(iterator)
    assert watch.stats().batches == 1


def test_loaders_of_several_threads_are_counted(watch: RunWatch) -> None:
    meets = threading.Barrier(2)

    class Meets(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            meets.wait(60)  # so that both threads wait for their batches at a time
            return index

    def train() -> None:
        for _ in torch.utils.data.DataLoader(Meets(), 4):
            pass

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = watch.stats()
    assert found.batches == 4
    assert found.compute_fraction + found.stall_fraction == pytest.approx(1.0)
    assert 0 < found.wait_p50_s < found.elapsed_s


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_is_watched_and_the_loader_that_it_reads_is_part_of_it(
    watch: RunWatch, workers: int
) -> None:
    rows = stoker.from_iterable(range(40)).batch(4).workers(workers)
    read = stoker.from_loader(make_loader()).echo(2)
    for pipeline, batches in ((rows, 10), (read, 30)):
        iterator = iter(pipeline)
        for _ in iterator:
            assert not watch.reader().entered_ns
        assert watch.stats().batches == batches
    found = watch.stats()
    assert 0 < found.wait_p50_s <= found.wait_p99_s < found.stall_fraction * found.elapsed_s


def test_its_numbers_are_metrics(watch: RunWatch) -> None:
    list(make_loader())
    found = stoker.metrics(watch, prefix="")
    assert found["batches_total"] == 10
    assert found["stall_fraction"] + found["compute_fraction"] == pytest.approx(1.0)
    assert {"wait_p50_s", "wait_p95_s", "wait_p99_s", "elapsed_s_total"} <= set(found)


def test_a_port_serves_the_page_and_the_metrics() -> None:
    pytest.importorskip("prometheus_client")
    watch = stoker.watch(port=0)
    try:
        list(make_loader())
        assert watch.url is not None
        with urllib.request.urlopen(watch.url) as answer:
            page, kind = answer.read().decode(), answer.headers["Content-Type"]
        with urllib.request.urlopen(watch.url + "metrics") as answer:
            numbers = answer.read().decode()
    finally:
        watch.close()
    assert kind == "text/html; charset=utf-8"
    assert re.search(r"<title>stoker watch: .+, rank 0</title>", page)
    assert 'stoker_batches_total{pipeline="watch"} 10.0' in numbers


def test_a_second_call_ends_the_first_and_a_closed_watch_counts_nothing() -> None:
    first = stoker.watch()
    second = stoker.watch()
    assert first.is_closed
    list(make_loader())
    assert (first.stats().batches, second.stats().batches) == (0, 10)
    second.close()
    second.close()
    list(make_loader())
    assert second.stats().batches == 10
    assert second.stats() == second.stats(), "its time is over"


@pytest.mark.parametrize("port", [-1, 65536, 1.5, "80"])
def test_a_wrong_port_is_refused(port: Any) -> None:
    with pytest.raises(ValueError, match="a port is a whole number from 0 to 65535"):
        stoker.watch(port=port)


def test_a_port_of_a_rank_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="port 65535 plus the local rank 1 is no port"):
        stoker.watch(port=65535)


@pytest.mark.full
def test_a_stopped_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_WINDOW_S", 0.3)
    watch = stoker.watch()
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            for _ in loader:
                pass

    loader = make_loader(400, num_workers=1, persistent_workers=True)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        deadline = time.monotonic() + 120
        while watch.stats().batches < 50:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (worker,) = loader._iterator._workers
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            while not any(f"process {worker.pid}" in text for text in watch.stats().warnings):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
    finally:
        over.set()
        thread.join(60)
        watch.close()


@pytest.mark.full
def test_a_script_without_pytorch_is_watched_with_its_pipelines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, stoker\n"
        "for _ in range(2):\n"
        "    list(stoker.from_iterable(range(40)).batch(4))\n"
        "print('torch' in sys.modules)\n"
    )
    found = run(tmp_path, "--do", "none", "--watch", "train.py")
    assert found.stdout == "False\n"
    assert re.match(r"stoker watch: [\d,]+ s, 20 batches: compute ", found.stderr)


WATCHED = """
if __name__ == "__main__":
    train(make_model(), DataLoader(Rows(), 8, shuffle=True, num_workers=1))
    print(torch.rand(1).item())
"""


@pytest.mark.full
def test_a_watched_script_does_as_the_plain_one(tmp_path: Path) -> None:
    script = write_script(tmp_path, WATCHED)
    plain = start(tmp_path, sys.executable, script.name)
    found = run(tmp_path, "--do", "none", "--watch", script.name)
    assert plain.returncode == found.returncode == 0, found.stderr
    assert found.stdout == plain.stdout
    (line,) = found.stderr.splitlines()
    assert re.match(r"stoker watch: [\d,]+ s, 24 batches: compute ", line)


@pytest.mark.full
def test_loaders_that_were_changed_are_watched_once(tmp_path: Path) -> None:
    script = write_script(tmp_path, WATCHED)
    line = PRELUDE.count("\n") + 5
    report = write_advice(tmp_path, "num_workers=2", loader=f"train.py:{line}")
    plain = start(tmp_path, sys.executable, script.name)
    found = run(tmp_path, "--apply", report, "--watch", script.name)
    assert found.returncode == 0, found.stderr
    assert found.stdout == plain.stdout
    assert "num_workers 1 -> 2" in found.stderr
    assert re.search(r"^stoker watch: [\d,]+ s, 24 batches: ", found.stderr, re.MULTILINE)


@pytest.mark.full
def test_a_killed_worker_is_told(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import signal

        class Killed(Rows):
            def __getitem__(self, index):
                os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            train(make_model(), DataLoader(Killed(), 8, num_workers=1))
        """,
    )
    found = run(tmp_path, "--do", "none", "--watch", script.name)
    assert found.returncode == 1
    assert re.search(r"stoker watch: worker \d+ ended while the loop waited", found.stderr)


def test_nothing_to_apply_cannot_have_a_report() -> None:
    found = CliRunner().invoke(app, ["run", "--do", "none", "--apply", "x.json", "train.py"])
    assert found.exit_code == 1
    assert "--do none applies nothing" in found.output
