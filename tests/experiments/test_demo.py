"""The demonstration end to end, shrunken: for errors, not for figures."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from experiments import demo
from experiments.arms import Arm, default_arms, full_arms
from experiments.demo import plan_of, run_settings
from experiments.digits import DigitSpec
from experiments.images import composed_digits, user_images
from experiments.runs import RunRecord, run_arm
from experiments.screen import Screen
from experiments.settings import Settings
from experiments.storage import EmulatedSource, Limits, Source, in_memory, storage_of
from experiments.workloads import Learner, augment, augment_one, one_thread
from scripts import Watch, script
from stoker.cli import app

TINY = Settings(
    digits=DigitSpec(train=400, test=40),
    seeds=1,
    learning_rate=0.003,
    batch_size=8,
    widths=(4, 4, 8),
    pool_batches=4,
    largest_pool_fraction=0.2,
    readers=4,
    remote_latency_s=0.001,
    remote_requests=8,
    target_accuracy=0.05,
    budget_fresh=160,
    longest_s=3.0,
    grid=((1 << 40, 40),),
    scene=((1.0, 0.2), (3.4, 0.3), (1.0, 0.2)),
    scene_window_batches=4,
    scene_step_samples=6,
    image_px=16,
    step_samples=9,
    drain_batches=6,
)


DEFAULT = [Arm("none"), Arm("before", "auto"), Arm("memory")]


def screen(terminal: bool = False) -> tuple[Screen, io.StringIO]:
    text = io.StringIO()
    return Screen(Console(file=text, force_terminal=terminal, width=130)), text


def write_folder(folder: Path, classes: int = 2, images: int = 90) -> Path:
    rng = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(images):
            pixels = rng.integers(0, 120, (20, 24, 3), dtype=np.uint8) + 100 * label
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.jpg")
    return folder


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("terminal", [False, True])
def test_every_arm_runs_and_leaves_its_rows(tmp_path: Path, terminal: bool) -> None:
    # All arms once; what the live display adds, on a few.
    arms = DEFAULT if terminal else full_arms()
    shown, text = screen(terminal)
    settings = replace(TINY, seeds=2 if terminal else 1, target_accuracy=None)
    run_settings(settings, tmp_path, full=True, data=None, arms=arms, screen=shown)
    assert_rows(tmp_path, settings, arms, text.getvalue())


@pytest.mark.full
def test_the_arms_of_the_claim_run_and_leave_their_rows(tmp_path: Path) -> None:
    shown, text = screen()
    settings = replace(TINY, seeds=2, scene=((1.0, 0.1), (3.4, 0.1)), target_accuracy=None)
    run_settings(settings, tmp_path, full=False, data=None, arms=DEFAULT, screen=shown)
    assert_rows(tmp_path, settings, DEFAULT, text.getvalue())


def assert_rows(out: Path, settings: Settings, arms: list[Arm], output: str) -> None:
    """What an experiment left fits together."""
    found = json.loads((out / "demo.json").read_text())
    assert found["complete"]
    assert [s["arm"] for s in found["summaries"]] == [arm.key for arm in arms]
    assert len(found["runs"]) == len(plan_of(arms, settings))
    most_pooled = max(TINY.pool_batches, *(arm.most_uses for arm in arms)) * TINY.batch_size
    for row in found["runs"]:
        evaluations = row["evaluations"]
        seconds = [e["seconds"] for e in evaluations]
        assert seconds == sorted(seconds)
        assert all(0 <= e["accuracy"] <= 1 for e in evaluations)
        for e in evaluations:
            assert e["waited_s"] <= e["seconds"]
            assert e["grid"] <= e["fresh"] < e["grid"] + 2 * TINY.batch_size
            assert e["uses"] == e["steps"] * TINY.batch_size
            assert e["fresh"] - e["uses"] <= most_pooled  # read and not used yet
        if row["place"] == "memory":
            assert evaluations[-1]["fresh"] >= TINY.budget_fresh
        else:
            assert all(e["accuracy"] < found["target_accuracy"] for e in evaluations[:-1])
    for summary, arm in zip(found["summaries"], arms, strict=True):
        assert summary["realised_factor"] <= arm.most_uses
        assert arm.echoes or summary["realised_factor"] == 1
    Image.open(out / "demo.png").verify()
    assert "ms a read" in output
    assert output.index("measured") < output.index("Scene") < output.index("speed-up")
    said = " ".join(output.split())
    assert " ".join(found["conclusion"].split()[:6]) in said
    assert found["scene"]["conclusion"].split(",")[0] in said


def assert_scene(scene: dict[str, Any]) -> None:
    """The rows of a scene fit together, and with what was set."""
    assert scene["window_batches"] == TINY.scene_window_batches
    speeds = [stretch["calibration"] for stretch in scene["stretches"]]
    assert [speed["wanted_ratio"] for speed in speeds] == [1.0, 3.4, 1.0]
    known = {(speed["ratio"], speed["limits"]["latency_s"]) for speed in speeds}
    seconds = [row["seconds"] for row in scene["rows"]]
    assert seconds
    assert seconds == sorted(seconds)
    for row in scene["rows"]:
        assert (row["ratio"], row["latency_s"]) in known
        assert 0 <= row["waited_fraction"] <= 1
        assert row["factor"] > 0
        assert row["step_s"] > 0


def test_runs_that_are_compared_are_neighbours_and_memory_is_first() -> None:
    plan = plan_of(default_arms(), Settings())
    assert plan[0] == (Arm("memory"), 0)
    seeds = {arm: [seed for other, seed in plan if other == arm] for arm, _ in plan}
    assert seeds.pop(Arm("memory")) == [0]
    assert all(sorted(each) == [0, 1, 2, 3, 4] for each in seeds.values())
    places = [(seed, arm.place) for arm, seed in plan if arm.is_compared]
    assert places == [(s, p) for s in range(5) for p in ("none", "before")[:: 1 - 2 * (s % 2)]]
    numbers = {run: number for number, run in enumerate(plan)}
    for seed in range(5):
        gap = numbers[(Arm("none"), seed)] - numbers[(Arm("before", "auto"), seed)]
        assert abs(gap) == 1


@pytest.mark.full
def test_without_a_scene_there_is_none(tmp_path: Path) -> None:
    shown, text = screen()
    arms = [Arm("none"), Arm("batch", "auto")]
    settings = replace(TINY, scene=())
    run_settings(settings, tmp_path, full=False, data=None, arms=arms, screen=shown)
    assert json.loads((tmp_path / "demo.json").read_text())["scene"] is None
    assert "Scene" not in text.getvalue()
    Image.open(tmp_path / "demo.png").verify()


@pytest.mark.full
def test_runs_of_one_seed_see_the_same_data_in_the_same_order(tmp_path: Path) -> None:
    """Without echoing, emulated storage, a server and memory train alike, step by step."""
    images = composed_digits(TINY.digits, tmp_path, lambda done, total: None)
    accuracies = []

    def train(place: str, source: Source) -> None:
        record = run_arm(Arm(place), 0, images, source, TINY, lambda e: e.fresh >= 320)
        accuracies.append({e.grid: e.accuracy for e in record.evaluations})

    with one_thread():
        train("memory", in_memory(images, TINY))
        for remote in (False, True):
            with (
                storage_of(images, TINY, remote=remote) as storage,
                storage.opened(storage.limits(0.01)) as source,
            ):
                train("none", source)
    assert len(accuracies[0]) == 8
    assert accuracies[1] == accuracies[0]
    assert accuracies[2] == accuracies[0]


class Noted(list[str]):
    """Paths of files; says when more of them are asked for than so many."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(paths)
        self.left, self.exceeded = len(paths), threading.Event()

    def __getitem__(self, at: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.exceeded.set()
        return super().__getitem__(at)


@pytest.mark.full
def test_an_evaluation_takes_no_time(tmp_path: Path) -> None:
    images = composed_digits(TINY.digits, tmp_path, lambda done, total: None)
    paths = Noted(images.train_paths)
    source = EmulatedSource(
        replace(images, train_paths=paths), Limits(0.1, 4)
    )  # slower than training
    began, ended = [], []

    def evaluate(record: RunRecord) -> None:
        began.append(time.perf_counter())
        paths.left = 4  # each reader may finish what it is at
        assert not paths.exceeded.wait(1.0)
        paths.left = len(paths)
        ended.append(time.perf_counter())

    with one_thread():
        record = run_arm(Arm("none"), 0, images, source, TINY, lambda e: e.fresh >= 80, evaluate)
    first, second = (e.seconds for e in record.evaluations)
    assert 0 < second - first <= began[1] - ended[0]


@pytest.mark.full
def test_a_server_takes_the_place_of_emulated_storage(tmp_path: Path) -> None:
    shown, text = screen()
    arms = [Arm("none"), Arm("batch", 2), Arm("none", slowness=1.0)]
    run_settings(TINY, tmp_path, full=True, data=None, remote=True, arms=arms, screen=shown)
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["complete"]
    assert found["storage"] == "a local HTTP server"
    for row in found["calibrations"]:
        assert row["limits"]["latency_s"] == TINY.remote_latency_s
        assert row["limits"]["requests"] == TINY.remote_requests
    output = " ".join(text.getvalue().split())
    assert "latency 1 ms, bandwidth" in output
    assert "8 requests in flight" in output
    assert "emulated storage, not a local HTTP server, slows down" in output
    assert_scene(found["scene"])


def test_limits_of_storage_follow_the_time_of_a_batch(tmp_path: Path) -> None:
    images = user_images(write_folder(tmp_path / "data"), TINY, lambda done, total: None)
    with storage_of(images, TINY, remote=False) as storage:
        assert storage.limits(0.02) == Limits(0.01, 4)
        assert storage.limits(0.0) == Limits(0.0, 4)
    with storage_of(images, TINY, remote=True) as storage:
        batch_bytes = 8 * images.train_bytes / len(images.train_paths)
        bandwidth: Any = pytest.approx(batch_bytes / 0.02)
        assert storage.limits(0.02) == Limits(0.001, 8, bandwidth)
        assert storage.limits(0.0) == Limits(0.001, 8, None)


def test_a_server_has_the_training_images_alone_and_in_order(tmp_path: Path) -> None:
    images = user_images(write_folder(tmp_path / "data"), TINY, lambda done, total: None)
    with (
        storage_of(images, TINY, remote=True) as storage,
        storage.opened(storage.limits(0.0)) as source,
    ):
        examples = list(source(0))
        assert source(0) is source(0)
    assert [label for _, label in examples] == list(images.train_labels)
    assert [data for data, _ in examples] == [Path(p).read_bytes() for p in images.train_paths]


@pytest.mark.full
@pytest.mark.parametrize("remote", [False, True])
def test_a_users_folder_gets_a_target_of_its_own(tmp_path: Path, remote: bool) -> None:
    data = write_folder(tmp_path / "data")
    shown, text = screen()
    run_settings(TINY, tmp_path / "out", full=False, data=data, remote=remote, screen=shown)
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["images"]["classes"] == ["class0", "class1"]
    assert found["images"]["train"] == 144
    assert 0 < found["target_accuracy"] <= 1
    assert "simply be cached" in text.getvalue()
    assert_scene(found["scene"])


def test_a_users_images_are_parted_the_same_way_every_time(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data")
    once, again = (user_images(data, TINY, lambda done, total: None) for _ in range(2))
    assert list(once.train_paths) == list(again.train_paths)
    assert sorted(set(once.test_labels)) == [0, 1]
    first = once.decode(Path(once.train_paths[0]).read_bytes())
    np.testing.assert_array_equal(first, once.train_images[0])


def test_a_folder_that_will_not_do_says_why(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        user_images(folder, TINY, lambda done, total: None)

    with pytest.raises(FileNotFoundError, match="sub-folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="at least two sub-folders"):
        read(tmp_path)
    with pytest.raises(ValueError, match="class0"):
        read(write_folder(tmp_path / "one", classes=1))
    with pytest.raises(ValueError, match="at least 5"):
        read(write_folder(tmp_path / "few", images=3))
    with pytest.raises(ValueError, match="needs 128"):
        read(write_folder(tmp_path / "some", images=20))
    broken = write_folder(tmp_path / "broken")
    (broken / "class1" / "7.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"7\.jpg cannot be read"):
        read(broken)


@pytest.mark.full
def test_ctrl_c_keeps_the_runs_that_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_arm, runs = demo.run_arm, 0

    def stopped(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 3:
            raise KeyboardInterrupt
        return run_arm(*args)

    monkeypatch.setattr(demo, "run_arm", stopped)
    shown, text = screen()
    with pytest.raises(KeyboardInterrupt):
        run_settings(replace(TINY, scene=()), tmp_path, full=False, data=None, screen=shown)
    found = json.loads((tmp_path / "demo.json").read_text())
    assert not found["complete"]
    assert len(found["runs"]) == 2
    assert "2 of 5 runs" in text.getvalue()


@pytest.mark.interrupts
@pytest.mark.full
@pytest.mark.parametrize("when", ["listing", "reading"])
def test_ctrl_c_ends_the_server_and_leaves_nothing(tmp_path: Path, when: str) -> None:
    body = f"""
    import tempfile
    from dataclasses import replace
    from pathlib import Path
    import psutil
    from experiments import runs, storage
    from experiments.arms import Arm
    from experiments.demo import run_settings
    from experiments.digits import DigitSpec
    from experiments.settings import Settings

    tempfile.tempdir = {str(tmp_path)!r}

    def told(function):
        def telling(*args, **options):
            say(json.dumps([p.pid for p in psutil.Process().children()]))
            return function(*args, **options)
        return telling

    if {when!r} == "listing":
        # Or Ctrl-C may come within the import, or as fsspec makes its event loop.
        import stoker.sources.remote.files, fsspec.asyn, fsspec.implementations.http
        fsspec.asyn.get_loop()
        stoker.from_folder = told(stoker.from_folder)
        seconds = 5.0
    else:
        runs.Learner.step = told(runs.Learner.step)
        seconds = 0.001
    settings = Settings(
        digits=DigitSpec(train=400, test=40), batch_size=8, step_samples=9, drain_batches=6,
        remote_latency_s=seconds, largest_pool_fraction=0.2, scene=(),
        target_accuracy=1.0,
    )
    threads = threading.active_count()
    try:
        run_settings(
            settings, Path({str(tmp_path / "out")!r}), full=False, data=None, remote=True,
            arms=[Arm("none")],
        )
    except KeyboardInterrupt:
        say("stopped " + str(left()["threads"]))
    """
    with script(tmp_path, body) as running:
        pids: list[int] = []
        while not pids:
            line = running.line()
            pids = json.loads(line) if line.startswith("[") and line.endswith("]") else []
        with Watch(pids) as watch:
            os.kill(running.pid, signal.SIGINT)
            assert watch.gone()
        _, out, errors = running.finish()
    assert "stopped []" in out, errors
    assert errors == ""
    left = {path.name for path in tmp_path.iterdir()}
    assert {name for name in left if not name.startswith("torchinductor")} == {"out", "script.py"}


@pytest.mark.parametrize("arguments", [[], ["--seeds", "5", "--remote"]])
def test_the_installed_command_says_where_the_demo_is(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "run scripts/demo" in result.stderr
    assert result.stderr.count("\n") == 1


def test_augmentation_leaves_its_input_and_depends_on_its_generator_alone() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    kept = images.copy()
    once = augment(images, np.random.default_rng(1))
    again = augment(images, np.random.default_rng(1))
    np.testing.assert_array_equal(images, kept)
    np.testing.assert_array_equal(once, again)
    assert once.shape == images.shape
    assert once.dtype == np.uint8
    assert not np.array_equal(once, augment(images, np.random.default_rng(2)))
    assert augment_one(images[0], np.random.default_rng(1)).shape == images[0].shape


@pytest.mark.full
def test_the_same_seed_gives_the_same_network() -> None:
    images = np.random.default_rng(0).integers(0, 256, (300, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(300) % 10
    accuracies = []
    for _ in range(2):
        learner = Learner(10, (4, 4, 8), 0.01, seed=3)
        for start in range(0, 64, 32):
            learner.step(images[start : start + 32], labels[start : start + 32])
        accuracies.append(learner.accuracy(images, labels))
    assert accuracies[0] == accuracies[1]
